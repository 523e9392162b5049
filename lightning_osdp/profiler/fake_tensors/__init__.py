"""The model on tensors without values."""
