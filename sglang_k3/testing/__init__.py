"""What a test of K3 needs and the served model must not: a step-by-step reference and tiny checkpoints.

``reference`` is written from the equations alone and shares no code with ``kernels`` or ``models``, so that
agreement between the two means something. ``tiny`` writes small random checkpoints in the published layout.
"""
