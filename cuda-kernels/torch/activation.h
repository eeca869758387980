// Activations by name, and as PyTorch operations: for operators that compute off the GPU or are
// differentiated again.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <string_view>
#include <utility>

#include "lib/activation.h"

namespace kernel_twins {

using at::Tensor;

inline Activation activation_of(std::string_view name) {
  constexpr std::pair<std::string_view, Activation> NAMES[] = {{"none", Activation::none},
                                                               {"relu", Activation::relu},
                                                               {"gelu", Activation::gelu},
                                                               {"gelu_tanh", Activation::gelu_tanh},
                                                               {"silu", Activation::silu}};
  for (const auto& [known, activation] : NAMES) {
    if (name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, "activation is '", std::string(name),
                    "', must be none, relu, gelu, gelu_tanh or silu: apply others to the result");
}

inline Tensor activated(const Tensor& pre, Activation activation) {
  switch (activation) {
    case Activation::none:
      return pre;
    case Activation::relu:
      return at::relu(pre);
    case Activation::gelu:
      return at::gelu(pre);
    case Activation::gelu_tanh:
      return at::gelu(pre, "tanh");
    case Activation::silu:
      return at::silu(pre);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// dout * activation'(saved), in PyTorch operations that can be differentiated again. `saved` is the
// activation's input; for relu it may be the result.
inline Tensor differentiable_dz(const Tensor& dout, const Tensor& saved, Activation activation) {
  switch (activation) {
    case Activation::none:
      return dout;
    case Activation::relu:
      return at::threshold_backward(dout, saved, 0);
    case Activation::gelu:
      return at::gelu_backward(dout, saved);
    case Activation::gelu_tanh:
      return at::gelu_backward(dout, saved, "tanh");
    case Activation::silu: {
      if (!at::GradMode::is_enabled()) return at::silu_backward(dout, saved);  // not differentiable again
      const Tensor s = at::sigmoid(saved);
      return dout * s * (1 + saved * (1 - s));
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace kernel_twins
