// linear's steps, activation(x @ weight.T + bias), and the operators behind kernel_twins.linear.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/tensor_map.h"
#include "matmul/linear/args.h"
#include "products.h"
#include "torch/activation.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// Always with a bias, and without storing the activation's argument; the operator takes both choices.
void linear_step(const std::string& step, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& out, const std::string& activation) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("linear", linear_steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.x = x.const_data_ptr(),
                        .weight = weight.const_data_ptr(),
                        .bias = bias.const_data_ptr(),
                        .out = out.mutable_data_ptr(),
                        .pre = nullptr,
                        .M = x.size(0),
                        .N = weight.size(0),
                        .K = x.size(1),
                        .stride_xm = x.stride(0),
                        .stride_xk = x.stride(1),
                        .stride_wn = weight.stride(0),
                        .stride_wk = weight.stride(1),
                        .dtype = dtype_of(x),
                        .activation = activation_of(activation),
                        .memory = &memory,
                        .stream = lender.stream()});
  mark_written(out);
}

// -----------------------------------------------------------------------------------------------------------
// Forward
// -----------------------------------------------------------------------------------------------------------

// Whether the backward pass needs the activation's argument.
bool needs_pre(Activation activation) {
  return activation != Activation::none && activation != Activation::relu;
}

template <typename Int>
std::vector<Int> linear_shape(at::ArrayRef<Int> x, at::ArrayRef<Int> weight) {
  TORCH_CHECK_VALUE(weight.size() == 2, "weight has ", text(static_cast<int64_t>(weight.size())),
                    " dimensions, must have 2");
  TORCH_CHECK_VALUE(weight[1] == x.back(), "weight has shape ", tuple(weight), ", must have ", text(x.back()),
                    " columns, as many as x, of shape ", tuple(x),
                    ", has in its last dimension: slice one, or "
                    "transpose a matrix with .mT");
  std::vector<Int> shape(x.begin(), x.end());
  shape.back() = weight[0];
  return shape;
}

void check_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool wide) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    if (!(wide && tensor.scalar_type() == at::kDouble)) {
      require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
    }
    require_same_dtype(name, tensor, "x", x);
    require_same_device(name, tensor, "x", x);
  };
  check("x", x);
  check("weight", weight);
  TORCH_CHECK_VALUE(x.dim() > 0, "x has 0 dimensions, must have 1 or more: call x.unsqueeze(0)");
  linear_shape(x.sym_sizes(), weight.sym_sizes());
  if (!bias) return;
  check("bias", *bias);
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias has shape ",
                    tuple(bias->sym_sizes()), ", must have (", text(weight.sym_size(0)),
                    ",): one element for each row of weight");
}

// out, and the activation's argument if `save` asks for it (else undefined).
std::pair<Tensor, Tensor> linear_forward_cpu(const Tensor& x, const Tensor& weight,
                                             const OptionalTensor& bias, Activation activation, bool save) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_linear(x, weight, bias, true);
  const Tensor pre = at::linear(x, weight, bias).contiguous();
  return {activated(pre, activation), save ? pre : Tensor()};
}

std::pair<Tensor, Tensor> linear_forward_meta(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, Activation, bool save) {
  check_linear(x, weight, bias, is_wide(x));
  const auto shape = linear_shape(x.sym_sizes(), weight.sym_sizes());
  return {at::empty_symint(shape, x.options()), save ? at::empty_symint(shape, x.options()) : Tensor()};
}

std::pair<Tensor, Tensor> linear_forward_cuda(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, Activation activation, bool save) {
  check_linear(x, weight, bias, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto shape = linear_shape(x.sizes(), weight.sizes());
  const Tensor rows = as_matrix(x);
  const bool large = std::max({rows.size(0), rows.size(1), weight.size(0)}) >= LARGEST_SIZE;
  const Step<LinearArgs>* step = large || x.scalar_type() == at::kFloat
                                     ? nullptr
                                     : find_that_runs<linear_steps>("linear", x.get_device());
  Tensor out = empty(shape, x.scalar_type(), x.device());
  if (!step) {
    if (out.numel() > 0) {
      multiply(matrix_of(rows), matrix_of(weight.t()), out.mutable_data_ptr(), x.scalar_type(),
               x.scalar_type(), x.get_device());
    }
    if (bias) out.add_(*bias);
    return {activated(out, activation), save ? out : Tensor()};
  }
  const Tensor dense_bias = bias ? bias->contiguous() : Tensor();
  Tensor pre = save ? empty(shape, x.scalar_type(), x.device()) : Tensor();
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(*step, {.x = rows.const_data_ptr(),
                        .weight = weight.const_data_ptr(),
                        .bias = bias ? dense_bias.const_data_ptr() : nullptr,
                        .out = out.mutable_data_ptr(),
                        .pre = save ? pre.mutable_data_ptr() : nullptr,
                        .M = rows.size(0),
                        .N = weight.size(0),
                        .K = weight.size(1),
                        .stride_xm = rows.stride(0),
                        .stride_xk = rows.stride(1),
                        .stride_wn = weight.stride(0),
                        .stride_wk = weight.stride(1),
                        .dtype = dtype_of(x),
                        .activation = activation,
                        .memory = &memory,
                        .stream = lender.stream()});
  return {out, pre};
}

template <auto FORWARD>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              c10::string_view activation) {
  return FORWARD(x, weight, bias, activation_of(activation), false).first;
}

template <auto FORWARD>
std::tuple<Tensor, Tensor> linear_saving(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         c10::string_view activation) {
  const Activation chosen = activation_of(activation);
  TORCH_CHECK_VALUE(needs_pre(chosen), "activation is '", std::string(activation),
                    "', which saves nothing of its own");
  return FORWARD(x, weight, bias, chosen, true);
}

// -----------------------------------------------------------------------------------------------------------
// Backward
// -----------------------------------------------------------------------------------------------------------

Activation check_backward(const Tensor& dout, const Tensor& saved, c10::string_view activation) {
  const Activation chosen = activation_of(activation);
  TORCH_CHECK_VALUE(chosen != Activation::none, "activation is 'none', whose dz is dout");
  require_dtype("dout", dout, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  require_same_dtype("saved", saved, "dout", dout);
  require_same_device("saved", saved, "dout", dout);
  TORCH_CHECK_VALUE(dout.dim() > 0 && saved.sym_sizes() == dout.sym_sizes(), "saved has shape ",
                    tuple(saved.sym_sizes()), ", must have that of dout, ", tuple(dout.sym_sizes()));
  return chosen;
}

// dz, and its sum over all rows, by PyTorch's operations.
std::tuple<Tensor, Tensor> linear_backward_aten(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  const Activation chosen = check_backward(dout, saved, activation);
  const Tensor dz = differentiable_dz(dout, saved, chosen).contiguous();
  return {dz, as_matrix(dz).sum(0)};
}

std::tuple<Tensor, Tensor> linear_backward_meta(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  check_backward(dout, saved, activation);
  return {at::empty_symint(dout.sym_sizes(), dout.options()),
          at::empty_symint({dout.sym_size(-1)}, dout.options())};
}

std::tuple<Tensor, Tensor> linear_backward_cuda(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  const Activation chosen = check_backward(dout, saved, activation);
  const bool half = dout.scalar_type() == at::kBFloat16 || dout.scalar_type() == at::kHalf;
  if (!half || dout.numel() == 0 || dout.size(-1) >= LARGEST_SIZE) {
    return linear_backward_aten(dout, saved, activation);
  }
  const c10::cuda::CUDAGuard guard(dout.device());
  const Tensor dense = dout.contiguous();
  const Tensor values = saved.contiguous();
  Tensor dz = at::empty_like(dense);
  Tensor dbias = empty({dout.size(-1)}, dout.scalar_type(), dout.device());
  Lender lender;
  const Memory memory = lender.memory();
  ::linear_backward({.dout = dense.const_data_ptr(),
                     .saved = values.const_data_ptr(),
                     .dz = dz.mutable_data_ptr(),
                     .dbias = dbias.mutable_data_ptr(),
                     .M = dout.numel() / dout.size(-1),
                     .N = dout.size(-1),
                     .dtype = dtype_of(dout),
                     .activation = chosen,
                     .memory = &memory,
                     .stream = lender.stream()});
  return {dz, dbias};
}

// -----------------------------------------------------------------------------------------------------------
// Gradients
// -----------------------------------------------------------------------------------------------------------

Tensor call_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   c10::string_view activation) {
  static const auto op = find_operator<decltype(call_linear)>("kernel_twins::linear");
  return op.call(x, weight, bias, activation);
}

std::tuple<Tensor, Tensor> call_linear_saving(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, c10::string_view activation) {
  static const auto op = find_operator<decltype(call_linear_saving)>("kernel_twins::linear_saving");
  return op.call(x, weight, bias, activation);
}

std::tuple<Tensor, Tensor> call_linear_backward(const Tensor& dout, const Tensor& saved,
                                                c10::string_view activation) {
  static const auto op = find_operator<decltype(call_linear_backward)>("kernel_twins::linear_backward");
  return below_autograd("linear_backward", {&dout}, [&] { return op.call(dout, saved, activation); });
}

// The argument of gelu, gelu_tanh or silu is an output of the node beside the result. If a gradient is
// differentiated again, it reaches x, weight and bias through that output, saved or not.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static constexpr const char* NAME = "LinearBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto kept = context->get_saved_variables();
    const Tensor& x = kept[0];
    const Tensor& weight = kept[1];
    const std::string& activation = context->saved_data["activation"].toStringRef();
    Tensor dz = gradients[0];
    Tensor dbias;
    if (dz.defined() && activation != "none") {
      if (at::GradMode::is_enabled()) {
        dz = differentiable_dz(dz, kept[2], activation_of(activation));
      } else {
        std::tie(dz, dbias) = call_linear_backward(dz, kept[2], activation);
      }
    }
    if (gradients.size() > 1 && gradients[1].defined()) {
      dz = dz.defined() ? dz + gradients[1] : gradients[1];
      dbias = Tensor();
    }
    if (!dz.defined()) return {Tensor(), Tensor(), Tensor()};
    const bool wants_bias = context->needs_input_grad(2);
    if (wants_bias && !dbias.defined()) dbias = dz.sum_to_size_symint({dz.sym_size(-1)});
    Tensor dx;
    Tensor dweight;
    if (context->needs_input_grad(0)) dx = call_matmul(dz, weight, std::nullopt);
    if (context->needs_input_grad(1)) {
      dweight = call_matmul(as_matrix(dz).mT(), as_matrix(x), std::nullopt);
    }
    return {dx, dweight, wants_bias ? dbias : Tensor()};
  }
};

Tensor linear_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       c10::string_view activation) {
  const Tensors inputs = {&x, &weight, or_none(bias)};
  const auto call = [&] { return call_linear(x, weight, bias, activation); };
  if (!compute_requires_grad(x, weight, bias)) return below_autograd("linear", inputs, call);
  const Activation chosen = activation_of(activation);
  Tensor out, pre;
  if (needs_pre(chosen)) {
    const auto call_saving = [&] { return call_linear_saving(x, weight, bias, activation); };
    std::tie(out, pre) = below_autograd("linear", inputs, call_saving);
  } else {
    out = below_autograd("linear", inputs, call);
  }
  record<LinearFunction>(inputs, {&out, &pre}, [&](AutogradContext& context) {
    context.save_for_backward({weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor(),
                               chosen == Activation::relu ? out : pre});
    context.saved_data["activation"] = std::string(activation);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias=None, str activation='none') -> Tensor",
              {at::Tag::pt2_compliant_tag});
  // The parts of linear's gradient.
  library.def("linear_saving(Tensor x, Tensor weight, Tensor? bias, str activation) -> (Tensor, Tensor)",
              {at::Tag::pt2_compliant_tag});
  library.def("linear_backward(Tensor dout, Tensor saved, str activation) -> (Tensor, Tensor)",
              {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("linear", linear<linear_forward_cuda>);
  library.impl("linear_saving", linear_saving<linear_forward_cuda>);
  library.impl("linear_backward", linear_backward_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("linear", linear<linear_forward_cpu>);
  library.impl("linear_saving", linear_saving<linear_forward_cpu>);
  library.impl("linear_backward", linear_backward_aten);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("linear", linear<linear_forward_meta>);
  library.impl("linear_saving", linear_saving<linear_forward_meta>);
  library.impl("linear_backward", linear_backward_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("linear", linear_autograd);
  library.impl("linear_saving", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_backward", torch::autograd::autogradNotImplementedFallback());
}

void kernel_twins::define_linear(pybind11::module_& module) {
  define_steps(
      module, "linear", linear_step,
      "out = activation(x @ weight.T + bias), none, relu, gelu, gelu_tanh or silu. x: [M, K], weight: "
      "[N, K], any strides; bias: [N], out: [M, N], contiguous; all bf16 or fp16.",
      arg("x"), arg("weight"), arg("bias"), kw_only(), arg("out"), arg("activation") = "none");
}
