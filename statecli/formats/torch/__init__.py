"""What the readers of torch's own formats share: sections, tensors, optimizers, whole modules."""
