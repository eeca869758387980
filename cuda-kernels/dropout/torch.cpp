// The operators behind kernel_twins.dropout_add; see matmul/torch.cpp for why in C++.
//
// `state` is what a mask is drawn from: the seed and the offset, [2] in int64, where the mask is drawn. The
// kernel notes it there itself, as under graph capture only the GPU knows it; backward passes read it there.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "dropout/dropout_add/args.h"
#include "dropout/dropout_add_backward/args.h"
#include "dropout/dropout_add_backward/bias.h"
#include "philox.h"
#include "torch/activation.h"
#include "torch/adaptor.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/rows.h"

namespace {

using at::Tensor;
using namespace kernel_twins;
using OptionalTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Name = c10::string_view;  // of an activation

constexpr Step<DropoutAddBackwardArgs> BIAS = {"bias", dropout_add_backward_bias, ">=8.0"};

// -----------------------------------------------------------------------------------------------------------
// What goes together
// -----------------------------------------------------------------------------------------------------------

void require_like(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, " is ", dtype_name(tensor.scalar_type()),
                   ", must be ", dtype_name(like.scalar_type()), " like ", like_name, ": call ", name, ".to(",
                   like_name, ".dtype), or pass backend='torch'");
  require_same_device(name, tensor, like_name, like);
}

void require_matrix_like(const char* name, const OptionalTensor& tensor, const char* like_name,
                         const Tensor& like) {
  if (!tensor) return;
  require_like(name, *tensor, like_name, like);
  TORCH_CHECK_VALUE(tensor->sym_sizes() == like.sym_sizes(), name, " has shape ", tuple(tensor->sym_sizes()),
                    ", must have that of ", like_name, ", ", tuple(like.sym_sizes()));
}

void require_bias(const OptionalTensor& bias, const char* like_name, const Tensor& like) {
  if (!bias) return;
  require_like("bias", *bias, like_name, like);
  TORCH_CHECK_VALUE(like.dim() > 0, like_name,
                    " has 0 dimensions, must have 1 or more where there is a bias");
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == like.sym_size(-1), "bias has shape ",
                    tuple(bias->sym_sizes()), ", must have (", text(like.sym_size(-1)),
                    ",): one element for each in ", like_name, "'s last dimension");
}

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

// Whether a mask depends on random numbers; where it does not, none are used up.
bool is_random(double p) { return 0.0 < p && p < 1.0; }

// A row lies along the last dimension; a tensor without dimensions is a row of one element.
int64_t row_dim(const Tensor& tensor) { return std::max<int64_t>(tensor.dim() - 1, 0); }
int64_t row_length(const Tensor& tensor) { return tensor.dim() > 0 ? tensor.size(-1) : 1; }

std::optional<Rows> rows_or_none(const OptionalTensor& tensor) {
  return tensor ? std::optional<Rows>(std::in_place, *tensor, row_dim(*tensor)) : std::nullopt;
}

Tensor contiguous_or_none(const OptionalTensor& tensor) { return tensor ? tensor->contiguous() : Tensor(); }

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// -----------------------------------------------------------------------------------------------------------
// On the GPU
// -----------------------------------------------------------------------------------------------------------

// From the default generator, which moves on by more than the four words of a block: by as much as for the
// Triton backend, whose state comes by an empty draw of PyTorch's gamma. So both draw the same masks.
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
  const auto& step =
      first_that_runs<dropout_add_steps>("dropout_add", {"v05_more_warps"}, false, x.get_device());
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
  const auto& step = x_grad ? first_that_runs<dropout_add_backward_steps>(
                                  "dropout_add_backward", {"v04_rows_abreast"}, false, dout.get_device())
                            : BIAS;
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

// -----------------------------------------------------------------------------------------------------------
// By PyTorch's operations
// -----------------------------------------------------------------------------------------------------------

Tensor widened(const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

Tensor shifted(const Tensor& x, const OptionalTensor& bias) {
  return bias ? widened(x) + widened(*bias) : widened(x);
}

// Element by element: what was written for a GPU can be tried without one.
Tensor mask_cpu(at::IntArrayRef sizes, const Tensor& state, double p) {
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

// Nothing where it is dropped, whatever it was.
Tensor masked(const Tensor& values, const Tensor& mask) {
  return at::where(mask, values, at::zeros({}, values.options()));
}

double scale_of(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

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

// In operations that can be differentiated again, but for the mask.
Pair backward_aten(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& mask, double p, Activation activation, bool x_grad, bool bias_grad) {
  Tensor dx = widened(dout) * scale_of(p);
  if (x) dx = differentiable_dz(dx, shifted(*x, bias), activation);
  dx = masked(dx, mask);
  const Tensor dbias = bias_grad ? dx.sum_to_size_symint({dx.sym_size(-1)}).to(dout.scalar_type()) : Tensor();
  return {x_grad ? dx.to(dout.scalar_type()) : Tensor(), dbias};
}

Pair backward_cpu(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                  const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad) {
  const Activation chosen = check_backward(dout, x, bias, state, p, activation, bias_grad, true);
  const auto [dx, dbias] =
      backward_aten(dout, x, bias, mask_cpu(dout.sizes(), state, p), p, chosen, x_grad, bias_grad);
  return {x_grad ? dx.contiguous() : at::empty({0}, dout.options()),
          bias_grad ? dbias.clone() : at::empty({0}, dout.options())};
}

// -----------------------------------------------------------------------------------------------------------
// Of shapes alone
// -----------------------------------------------------------------------------------------------------------

Pair forward_meta(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
                  Name activation) {
  check(x, residual, bias, p, activation, is_wide(x));
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty({2}, x.options().dtype(at::kLong))};
}

Pair backward_meta(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad) {
  check_backward(dout, x, bias, state, p, activation, bias_grad, is_wide(dout));
  const c10::SymInt columns = bias_grad ? dout.sym_size(-1) : c10::SymInt(0);
  return {x_grad ? at::empty_symint(dout.sym_sizes(), dout.options()) : at::empty({0}, dout.options()),
          at::empty_symint({columns}, dout.options())};
}

// -----------------------------------------------------------------------------------------------------------
// Gradients
// -----------------------------------------------------------------------------------------------------------

// Whichever is next in the dispatcher's order.
Pair call(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias, double p,
          Name activation) {
  static const auto op = find_operator<decltype(call)>("kernel_twins::dropout_add");
  return op.call(x, residual, bias, p, activation);
}

// What the public function returns, and nothing else; see matmul/torch.cpp.
Tensor dropout_add_result(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& bias,
                          double p, Name activation) {
  return std::get<0>(call(x, residual, bias, p, activation));
}

Pair call_backward(const Tensor& dout, const OptionalTensor& x, const OptionalTensor& bias,
                   const Tensor& state, double p, Name activation, bool x_grad, bool bias_grad) {
  static const auto op = find_operator<decltype(call_backward)>("kernel_twins::dropout_add_backward");
  return below_autograd("dropout_add_backward", {&dout},
                        [&] { return op.call(dout, x, bias, state, p, activation, x_grad, bias_grad); });
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
  // What its gradients are made of.
  library.def(
      "dropout_add_backward(Tensor dout, Tensor? x, Tensor? bias, Tensor state, float p, str activation, "
      "bool x_grad, bool bias_grad) -> (Tensor dx, Tensor dbias)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("dropout_add", forward_cuda);
  library.impl("dropout_add_backward", backward_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("dropout_add", forward_cpu);
  library.impl("dropout_add_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("dropout_add", forward_meta);
  library.impl("dropout_add_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("dropout_add", forward_autograd);
  library.impl("dropout_add_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("dropout_add_result", dropout_add_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // or vmap would go example by example
  library.impl("dropout_add_result", dropout_add_result);
}
