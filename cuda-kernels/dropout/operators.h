// Shared by dropout_add's operators, forward and backward.
//
// `state` is what a mask is drawn from, if it is drawn: seed and offset, [2] in int64. The kernel stores both
// itself, as under graph capture only the GPU knows them; backward passes read them there.
#pragma once

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <tuple>

#include "torch/activation.h"
#include "torch/checks.h"
#include "torch/rows.h"

namespace kernel_twins {

using Pair = std::tuple<Tensor, Tensor>;
using Name = c10::string_view;  // of an activation

inline void require_probability(double p) {
  char number[32];
  std::snprintf(number, sizeof(number), "%g", p);
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "p is ", std::string(number),
                    ", must be from 0 to 1: the share of elements that are dropped");
}

inline void require_matrix_like(const char* name, const OptionalTensor& tensor, const char* like_name,
                                const Tensor& like) {
  if (!tensor) return;
  require_like(name, *tensor, like_name, like);
  TORCH_CHECK_VALUE(tensor->sym_sizes() == like.sym_sizes(), name, " has shape ", tuple(tensor->sym_sizes()),
                    ", must have that of ", like_name, ", ", tuple(like.sym_sizes()));
}

inline void require_bias(const OptionalTensor& bias, const char* like_name, const Tensor& like) {
  if (!bias) return;
  require_like("bias", *bias, like_name, like);
  TORCH_CHECK_VALUE(like.dim() > 0, like_name,
                    " has 0 dimensions, must have 1 or more where there is a bias");
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == like.sym_size(-1), "bias has shape ",
                    tuple(bias->sym_sizes()), ", must have (", text(like.sym_size(-1)),
                    ",): one element for each in ", like_name, "'s last dimension");
}

// Whether a mask depends on random numbers; where it does not, none are used up.
inline bool is_random(double p) { return 0.0 < p && p < 1.0; }

// A row lies along the last dimension; a tensor without dimensions is a row of one element.
inline int64_t row_dim(const Tensor& tensor) { return std::max<int64_t>(tensor.dim() - 1, 0); }
inline int64_t row_length(const Tensor& tensor) { return tensor.dim() > 0 ? tensor.size(-1) : 1; }

inline std::optional<Rows> rows_or_none(const OptionalTensor& tensor) {
  return tensor ? std::optional<Rows>(std::in_place, *tensor, row_dim(*tensor)) : std::nullopt;
}

inline Tensor widened(const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

inline Tensor shifted(const Tensor& x, const OptionalTensor& bias) {
  return bias ? widened(x) + widened(*bias) : widened(x);
}

// 0 where dropped, whatever the element was.
inline Tensor masked(const Tensor& values, const Tensor& mask) {
  return at::where(mask, values, at::zeros({}, values.options()));
}

inline double scale_of(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

// The mask's elements, one after the other, on the CPU.
Tensor mask_cpu(at::IntArrayRef sizes, const Tensor& state, double p);

// In operations that can be differentiated again, but for the mask.
Pair backward_aten(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& mask, double p, Activation activation, bool x_grad, bool bias_grad);

// The backward operator, whatever is next in the dispatcher's order.
Pair call_backward(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad);

}  // namespace kernel_twins
