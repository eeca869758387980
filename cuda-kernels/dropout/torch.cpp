// The steps of dropout_add and its backward pass, and the operator behind kernel_twins.dropout_add.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "dropout/dropout_add/args.h"
#include "dropout/dropout_add_backward/args.h"
#include "operators.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// -----------------------------------------------------------------------------------------------------------
// Steps
// -----------------------------------------------------------------------------------------------------------

Dropout dropout_with(double p, uint64_t seed, uint64_t offset) {
  Dropout dropout = dropout_of(p);
  dropout.seed = seed;
  dropout.offset = offset;
  return dropout;
}

void dropout_add_step(const std::string& step, const Tensor& x, const OptionalTensor& residual,
                      const OptionalTensor& bias, const Tensor& out, double p, std::string_view activation,
                      uint64_t seed, uint64_t offset) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("dropout_add", dropout_add_steps, step, x);
  found.launch({.x = x.const_data_ptr(),
                .residual = data_or_null(residual),
                .bias = data_or_null(bias),
                .out = out.mutable_data_ptr(),
                .M = x.size(0),
                .N = x.size(1),
                .stride_xm = x.stride(0),
                .stride_rm = residual ? residual->stride(0) : 0,
                .dtype = dtype_of(x),
                .activation = activation_of(activation),
                .dropout = dropout_with(p, seed, offset),
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

void dropout_add_backward_step(const std::string& step, const Tensor& dout, const OptionalTensor& x,
                               const OptionalTensor& bias, const Out& out, double p,
                               std::string_view activation, uint64_t seed, uint64_t offset) {
  const std::vector<Tensor> outs = tensors_of(out);
  const c10::cuda::CUDAGuard guard(dout.device());
  const auto& found = find_step("dropout_add_backward", dropout_add_backward_steps, step, dout);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.dout = dout.const_data_ptr(),
                        .x = data_or_null(x),
                        .bias = data_or_null(bias),
                        .dx = outs[0].mutable_data_ptr(),
                        .dbias = outs.size() > 1 ? outs[1].mutable_data_ptr() : nullptr,
                        .M = dout.size(0),
                        .N = dout.size(1),
                        .stride_dm = dout.stride(0),
                        .stride_xm = x ? x->stride(0) : 0,
                        .dtype = dtype_of(dout),
                        .activation = activation_of(activation),
                        .dropout = dropout_with(p, seed, offset),
                        .memory = &memory,
                        .stream = lender.stream()});
  for (const Tensor& each : outs) mark_written(each);
}

// -----------------------------------------------------------------------------------------------------------
// The operator
// -----------------------------------------------------------------------------------------------------------

// `wide`: PyTorch computes, which takes float64 too.
Activation check(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
                 Name activation, bool wide) {
  require_probability(p);
  if (!(wide && x.scalar_type() == at::kDouble)) {
    require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  require_matrix_like("residual", residual, "x", x);
  require_bias(bias, "x", x);
  return activation_of(activation);
}

// Takes seed and offset from the default generator, and advances it by more than the four words of a Philox
// block: by as much as the Triton backend does, whose state comes by an empty draw of PyTorch's gamma. So
// both backends draw the same masks.
void draw(Dropout& dropout, int device) {
  constexpr uint64_t INCREMENT = 12;
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(static_cast<c10::DeviceIndex>(device)));
  at::PhiloxCudaState state;
  {
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    state = generator->philox_cuda_state(INCREMENT);
  }
  if (state.captured_) {
    dropout.seed_at = state.seed_.ptr;
    dropout.offset_at = state.offset_.ptr;
    dropout.offset = state.offset_intragraph_;
  } else {
    dropout.seed = state.seed_.val;
    dropout.offset = state.offset_.val;
  }
}

Pair forward_cuda(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
                  Name activation) {
  const Activation chosen = check(x, residual, bias, p, activation, false);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = empty(x.sizes(), x.scalar_type(), x.device());
  Tensor state = empty({2}, at::kLong, x.device());
  if (x.numel() == 0) return {out, state.zero_()};
  const Rows rows(x, row_dim(x));
  const auto residual_rows = rows_or_none(residual);
  const Tensor shift = contiguous_or_none(bias);
  Dropout dropout = dropout_of(p);
  if (is_random(p)) draw(dropout, x.get_device());
  dropout.used = state.mutable_data_ptr<int64_t>();
  const auto& step = first_that_runs<dropout_add_steps>("dropout_add", x.get_device());
  step.launch({.x = rows.data(),
               .residual = residual_rows ? residual_rows->data() : nullptr,
               .bias = data_or_null(shift),
               .out = out.mutable_data_ptr(),
               .M = x.numel() / row_length(x),
               .N = row_length(x),
               .stride_xm = rows.stride(),
               .stride_rm = residual_rows ? residual_rows->stride() : 0,
               .dtype = dtype_of(x),
               .activation = chosen,
               .dropout = dropout,
               .stream = c10::cuda::getCurrentCUDAStream()});
  return {out, state};
}

Pair forward_cpu(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
                 Name activation) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Activation chosen = check(x, residual, bias, p, activation, true);
  Tensor state = at::zeros({2}, at::kLong);
  if (is_random(p)) state.random_();
  const Tensor values = activated(shifted(x, bias), chosen) * scale_of(p);
  Tensor out = masked(values, mask_cpu(x.sizes(), state, p));
  if (residual) out = out + widened(*residual);
  return {out.to(x.scalar_type()).contiguous(), state};
}

Pair forward_meta(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
                  Name activation) {
  check(x, residual, bias, p, activation, is_wide(x));
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty({2}, x.options().dtype(at::kLong))};
}

// -----------------------------------------------------------------------------------------------------------
// Gradients
// -----------------------------------------------------------------------------------------------------------

// Calls the operator that is next in the dispatcher's order.
Pair call(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
          Name activation) {
  static const auto op = find_operator<decltype(call)>("kernel_twins::dropout_add");
  return op.call(x, residual, bias, p, activation);
}

// The public function's result, and nothing else; see torch/operator.h.
Tensor dropout_add_result(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias,
                          double p, Name activation) {
  return std::get<0>(call(x, residual, bias, p, activation));
}

class DropoutAddFunction : public torch::autograd::Function<DropoutAddFunction> {
 public:
  static constexpr const char* NAME = "DropoutAddBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dout = gradients[0];
    Tensor dx, dresidual, dbias;
    if (dout.defined()) {
      const bool x_grad = context->needs_input_grad(0);
      const bool bias_grad = context->needs_input_grad(2);
      if (context->needs_input_grad(1)) dresidual = dout;
      if (x_grad || bias_grad) {
        std::tie(dx, dbias) = gradients_of(context, dout, x_grad, bias_grad);
        if (!x_grad) dx = Tensor();
        if (!bias_grad) dbias = Tensor();
      }
    }
    return {dx, dresidual, dbias};
  }

 private:
  static Pair gradients_of(AutogradContext* context, const Tensor& dout, bool x_grad, bool bias_grad) {
    const auto saved = context->get_saved_variables();
    const auto given = [](const Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    const OptionalTensor x = given(saved[0]), bias = given(saved[1]);
    const double p = context->saved_data["p"].toDouble();
    const std::string activation = context->saved_data["activation"].toStringRef();
    if (!at::GradMode::is_enabled()) {
      return call_backward(dout, x, bias, saved[2], p, activation, x_grad, bias_grad);
    }
    // A gradient of ones comes back where it is kept.
    const Tensor ones = at::ones_symint(dout.sym_sizes(), dout.options());
    const Tensor mask =
        std::get<0>(call_backward(ones, std::nullopt, std::nullopt, saved[2], p, "none", true, false));
    return backward_aten(dout, x, bias, mask != 0, p, activation_of(activation), x_grad, bias_grad);
  }
};

Pair forward_autograd(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
                      Name activation) {
  const Tensors inputs = {&x, or_none(residual), or_none(bias)};
  const Pair made =
      below_autograd("dropout_add", inputs, [&] { return call(x, residual, bias, p, activation); });
  if (compute_requires_grad(x, residual, bias)) {
    const auto& [out, state] = made;  // no gradient flows through the state
    record<DropoutAddFunction>(inputs, {&out}, [&](AutogradContext& context) {
      const bool slopes = activation_of(activation) != Activation::none;
      context.save_for_backward({slopes ? x : Tensor(), slopes && bias ? *bias : Tensor(), state});
      context.saved_data["p"] = p;
      context.saved_data["activation"] = std::string(activation);
    });
  }
  return made;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def(
      "dropout_add(Tensor x, Tensor? residual, Tensor? bias, float p, str activation) "
      "-> (Tensor out, Tensor state)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  library.def(
      "dropout_add_result(Tensor x, Tensor? residual, Tensor? bias, float p, str activation) -> Tensor out",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) { library.impl("dropout_add", forward_cuda); }
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) { library.impl("dropout_add", forward_cpu); }
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) { library.impl("dropout_add", forward_meta); }
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) { library.impl("dropout_add", forward_autograd); }
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("dropout_add_result", dropout_add_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // or vmap would go example by example
  library.impl("dropout_add_result", dropout_add_result);
}

void register_dropout(pybind11::module_& module) {
  const auto none = pybind11::none();
  define_steps(
      module, "dropout_add", dropout_add_step,
      "out = dropout(activation(x + bias)) + residual. x, residual: [M, N], rows contiguous, fp32, bf16 or "
      "fp16; bias: [N]; out: [M, N], contiguous. Element i is kept where word i % 4 of Philox4x32-10 is at "
      "least p * 2**32: its key is seed, its counter offset / 4 and i / 4. offset is a multiple of 4.",
      arg("x"), arg("residual") = none, arg("bias") = none, kw_only(), arg("out"), arg("p") = 0.5,
      arg("activation") = "none", arg("seed") = 0, arg("offset") = 0);
  define_steps(
      module, "dropout_add_backward", dropout_add_backward_step,
      "out = the gradient of x through dropout_add, or those of x and bias. dout, x: [M, N], rows "
      "contiguous, fp32, bf16 or fp16 alike; bias: [N]; out: [M, N] and [N], contiguous. x, and a bias, only "
      "with an activation.",
      arg("dout"), arg("x") = none, arg("bias") = none, kw_only(), arg("out"), arg("p") = 0.5,
      arg("activation") = "none", arg("seed") = 0, arg("offset") = 0);
}
