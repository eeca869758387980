__path__ += [__file__.removesuffix("kernel_twins/_triton/__init__.py") + "triton-kernels"]
