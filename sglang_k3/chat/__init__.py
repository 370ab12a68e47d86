"""The XTML conversation format of K3."""
