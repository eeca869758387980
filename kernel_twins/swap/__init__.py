"""The public functions put into an existing model: ``kernel_twins.nn.replace_`` and ``restore_``."""
