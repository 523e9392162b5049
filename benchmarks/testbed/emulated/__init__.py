"""A GPU where there is none: made-up clocks and memory of ``torch.cuda``, and an accelerator of fake tensors."""
