__path__ += [__file__.removesuffix("kernel_twins/_profiling/__init__.py") + "profiling"]
