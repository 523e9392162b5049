"""Numbers and tensors that all ranks are to have the same, compared and taken from rank 0, by way of their hosts."""
