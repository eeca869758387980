"""The public functions: ordinary calls on tensors that allocate their results and differentiate."""
