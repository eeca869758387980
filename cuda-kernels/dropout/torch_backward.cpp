// The operator that computes dropout_add's gradients.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "dropout/dropout_add_backward/args.h"
#include "dropout/dropout_add_backward/bias.h"
#include "lib/philox.h"
#include "operators.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"

using at::Tensor;
using namespace kernel_twins;

namespace {

constexpr Step<DropoutAddBackwardArgs> BIAS = {"bias", dropout_add_backward_bias, ">=8.0"};

// Requires x exactly if there is an activation: its slope is taken at x + bias.
void require_slopes(Activation activation, std::string_view name, bool has_x, bool has_bias) {
  if (activation == Activation::none) {
    TORCH_CHECK_VALUE(!has_x && !has_bias,
                      "activation is 'none', which has no use for x and bias: leave them out");
  } else {
    TORCH_CHECK_VALUE(has_x, "x is missing, must be there: the slope of '", std::string(name),
                      "' is taken at x + bias");
  }
}

Activation check_backward(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                          const Tensor& state, double p, Name activation, bool bias_grad, bool wide) {
  require_probability(p);
  if (!(wide && dout.scalar_type() == at::kDouble)) {
    require_dtype("dout", dout, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  const Activation chosen = activation_of(activation);
  require_slopes(chosen, activation, x.has_value(), bias.has_value());
  require_matrix_like("x", x, "dout", dout);
  require_bias(bias, "dout", dout);
  TORCH_CHECK_VALUE(!bias_grad || dout.dim() > 0,
                    "dout has 0 dimensions, must have 1 or more where there is a bias");
  require_dtype("state", state, {at::kLong});
  TORCH_CHECK_VALUE(state.dim() == 1 && state.sym_size(0) == 2, "state has shape ", tuple(state.sym_sizes()),
                    ", must have (2,): a seed and an offset");
  require_same_device("state", state, "dout", dout);
  return chosen;
}

Pair backward_cuda(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad) {
  const Activation chosen = check_backward(dout, x, bias, state, p, activation, bias_grad, false);
  const c10::cuda::CUDAGuard guard(dout.device());
  Tensor dx = empty(x_grad ? dout.sizes() : at::IntArrayRef{0}, dout.scalar_type(), dout.device());
  Tensor dbias = empty({bias_grad ? row_length(dout) : 0}, dout.scalar_type(), dout.device());
  if (dout.numel() == 0 || !(x_grad || bias_grad)) return {dx, dbias.zero_()};
  const Rows rows(dout, row_dim(dout));
  const auto x_rows = rows_or_none(x);
  const Tensor shift = contiguous_or_none(bias);
  const Tensor used = state.contiguous();
  Dropout dropout = dropout_of(p);
  dropout.seed_at = used.const_data_ptr<int64_t>();
  dropout.offset_at = dropout.seed_at + 1;
  Lender lender;
  const Memory memory = lender.memory();
  const auto& step =
      x_grad ? first_that_runs<dropout_add_backward_steps>("dropout_add_backward", dout.get_device()) : BIAS;
  lender.launch(step, {.dout = rows.data(),
                       .x = x_rows ? x_rows->data() : nullptr,
                       .bias = data_or_null(shift),
                       .dx = x_grad ? dx.mutable_data_ptr() : nullptr,
                       .dbias = bias_grad ? dbias.mutable_data_ptr() : nullptr,
                       .M = dout.numel() / row_length(dout),
                       .N = row_length(dout),
                       .stride_dm = rows.stride(),
                       .stride_xm = x_rows ? x_rows->stride() : 0,
                       .dtype = dtype_of(dout),
                       .activation = chosen,
                       .dropout = dropout,
                       .memory = &memory,
                       .stream = lender.stream()});
  return {dx, dbias};
}

Pair backward_cpu(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                  const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad) {
  const Activation chosen = check_backward(dout, x, bias, state, p, activation, bias_grad, true);
  const auto [dx, dbias] =
      backward_aten(dout, x, bias, mask_cpu(dout.sizes(), state, p), p, chosen, x_grad, bias_grad);
  return {x_grad ? dx.contiguous() : at::empty({0}, dout.options()),
          bias_grad ? dbias.clone() : at::empty({0}, dout.options())};
}

Pair backward_meta(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad) {
  check_backward(dout, x, bias, state, p, activation, bias_grad, is_wide(dout));
  const c10::SymInt columns = bias_grad ? dout.sym_size(-1) : c10::SymInt(0);
  return {x_grad ? at::empty_symint(dout.sym_sizes(), dout.options()) : at::empty({0}, dout.options()),
          at::empty_symint({columns}, dout.options())};
}

}  // namespace

Tensor kernel_twins::mask_cpu(at::IntArrayRef sizes, const Tensor& state, double p) {
  Tensor mask = at::empty(sizes, at::kBool);
  const Tensor used = state.contiguous();
  const auto seed = static_cast<uint64_t>(used.const_data_ptr<int64_t>()[0]);
  const auto offset = static_cast<uint64_t>(used.const_data_ptr<int64_t>()[1]);
  const Dropout dropout = dropout_of(p);
  bool* kept = mask.mutable_data_ptr<bool>();
  Words words = {};
  for (int64_t i = 0; i < mask.numel(); ++i) {
    if (i % 4 == 0) words = random_words(seed, offset, i / 4);
    kept[i] = !dropout.all && words.of[i % 4] >= dropout.threshold;
  }
  return mask;
}

Pair kernel_twins::backward_aten(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                                 const Tensor& mask, double p, Activation activation, bool x_grad,
                                 bool bias_grad) {
  Tensor dx = widened(dout) * scale_of(p);
  if (x) dx = differentiable_dz(dx, shifted(*x, bias), activation);
  dx = masked(dx, mask);
  const Tensor dbias = bias_grad ? dx.sum_to_size_symint({dx.sym_size(-1)}).to(dout.scalar_type()) : Tensor();
  return {x_grad ? dx.to(dout.scalar_type()) : Tensor(), dbias};
}

Pair kernel_twins::call_backward(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                                 const Tensor& state, double p, Name activation, bool x_grad,
                                 bool bias_grad) {
  static const auto op = find_operator<decltype(call_backward)>("kernel_twins::dropout_add_backward");
  return below_autograd("dropout_add_backward", {&dout},
                        [&] { return op.call(dout, x, bias, state, p, activation, x_grad, bias_grad); });
}

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def(
      "dropout_add_backward(Tensor dout, Tensor? x, Tensor? bias, Tensor state, float p, str activation, "
      "bool x_grad, bool bias_grad) -> (Tensor dx, Tensor dbias)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) { library.impl("dropout_add_backward", backward_cuda); }
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) { library.impl("dropout_add_backward", backward_cpu); }
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) { library.impl("dropout_add_backward", backward_meta); }
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("dropout_add_backward", torch::autograd::autogradNotImplementedFallback());
}
