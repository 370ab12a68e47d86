"""The K3 language model: one file per kind of sub-layer.

Shape legend of this package: T tokens of the step, D hidden, H heads of this rank, N bank rows,
K and V head sizes, L latent, R shared-key size, E experts of this rank, I expert width of this rank.
"""
