"""What `torch.distributed.tensor` claims of its operators, against the truth."""
