"""Code shared by the readers of torch's own formats: sections, tensors, optimizers, whole modules."""
