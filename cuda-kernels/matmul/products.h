// Declarations that matmul's and linear's operators share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

namespace kernel_twins {

using at::Tensor;
using OptionalDtype = std::optional<at::ScalarType>;

// A matrix in a tensor's memory.
struct Matrix {
  const char* data;
  int64_t rows, cols, stride_row, stride_col;
};

// The last two dimensions.
inline Matrix matrix_of(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.size(-2), tensor.size(-1),
          tensor.stride(-2), tensor.stride(-1)};
}

// out = a @ b, on the current stream of the current device.
void multiply(const Matrix& a, const Matrix& b, void* out, at::ScalarType dtype, at::ScalarType out_dtype,
              int device);

// The operator matmul, whatever is next in the dispatcher's order.
Tensor call_matmul(const Tensor& a, const Tensor& b, OptionalDtype out_dtype);

// All leading dimensions as rows. Not by PyTorch's flatten, which is_grads_batched refuses.
inline Tensor as_matrix(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  const auto sizes = tensor.sym_sizes();
  return tensor.reshape_symint({c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()});
}

// Defines linear's steps; register_matmul defines those of the other products.
void define_linear(pybind11::module_& module);

}  // namespace kernel_twins
