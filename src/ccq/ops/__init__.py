"""Functions on tensors: the read step and the write rules."""
