// The operators behind kernel_twins.cross_entropy and its gradient in place; see matmul/torch.cpp for why in
// C++.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "loss/cross_entropy/args.h"
#include "loss/cross_entropy/mean.h"
#include "loss/cross_entropy_backward/args.h"
#include "torch/adaptor.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/rows.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// More than that the steps do not count, forward and backward.
constexpr int64_t MOST_CLASSES = (int64_t{1} << 31) - (int64_t{1} << 15);

constexpr Step<CrossEntropyMeanArgs> MEAN = {"mean", cross_entropy_mean, ">=8.0"};

// -----------------------------------------------------------------------------------------------------------
// What goes together
// -----------------------------------------------------------------------------------------------------------

// Classes lie along the second dimension, or the only one.
int64_t class_dim(const Tensor& input) { return input.dim() == 1 ? 0 : 1; }

std::vector<c10::SymInt> row_shape(const Tensor& input) {
  const auto sizes = input.sym_sizes();
  std::vector<c10::SymInt> shape(sizes.begin(), sizes.end());
  shape.erase(shape.begin() + class_dim(input));
  return shape;
}

// `wide`: PyTorch computes, which takes float64 too.
void check(const Tensor& input, const Tensor& target, int64_t reduction, double label_smoothing, bool wide) {
  if (!(wide && input.scalar_type() == at::kDouble)) {
    require_dtype("input", input, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  TORCH_CHECK_VALUE(
      input.dim() >= 1,
      "input has 0 dimensions, must have 1 or more: the classes' is the second, or the only one");
  if (!wide) {
    const c10::SymInt classes = input.sym_size(class_dim(input));
    TORCH_CHECK_VALUE(!TORCH_GUARD_OR_FALSE(classes.sym_gt(MOST_CLASSES)), "input has ", text(classes),
                      " classes, must have ", text(MOST_CLASSES), " or fewer: pass backend='torch'");
  }
  require_dtype("target", target, {at::kLong});
  require_same_device("target", target, "input", input);
  const auto shape = row_shape(input);
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), "target has shape ",
                    tuple(target.sym_sizes()), ", must have ", tuple(c10::SymIntArrayRef(shape)),
                    ": one class for each row of input, which has shape ", tuple(input.sym_sizes()));
  TORCH_CHECK_VALUE(at::Reduction::None <= reduction && reduction < at::Reduction::END, "reduction is ",
                    text(reduction), ", must be 0 for none, 1 for mean or 2 for sum");
  TORCH_CHECK_VALUE(0 <= label_smoothing && label_smoothing <= 1, "label_smoothing is ",
                    std::to_string(label_smoothing), ", must be from 0 to 1");
}

// The loss of rows or of all; beside it what the backward pass needs: for each row the logarithm of its sum
// of exponentials, and what a row's loss counts in that of all, of no elements where there is none of all.
using Losses = std::tuple<Tensor, Tensor, Tensor>;

// -----------------------------------------------------------------------------------------------------------
// Forward
// -----------------------------------------------------------------------------------------------------------

// With fp32_loss the loss is float32, else of the input's dtype.
Losses cross_entropy_cuda(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                          double label_smoothing, bool fp32_loss) {
  check(input, target, reduction, label_smoothing, false);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t dim = class_dim(input);
  const at::ScalarType loss_dtype = fp32_loss ? at::kFloat : input.scalar_type();
  const Tensor classes = target.contiguous();
  const Tensor losses = empty(target.sizes(), at::kFloat, input.device());
  const Tensor lse = empty(target.sizes(), at::kFloat, input.device());
  Lender lender;
  const int64_t M = target.numel();
  if (M > 0) {
    const Rows rows(input, dim);
    const auto& step = first_that_runs<cross_entropy_steps>(
        "cross_entropy", {"v05_cluster", "v04_rows_per_block"}, false, input.get_device());
    step.launch({.logits = rows.data(),
                 .target = classes.const_data_ptr<int64_t>(),
                 .losses = losses.mutable_data_ptr<float>(),
                 .lse = lse.mutable_data_ptr<float>(),
                 .M = M,
                 .N = input.size(dim),
                 .stride_lm = rows.stride(),
                 .ignore_index = ignore_index,
                 .dtype = dtype_of(input),
                 .smoothing = static_cast<float>(label_smoothing),
                 .stream = lender.stream()});
  }
  if (reduction == at::Reduction::None) {
    return {losses.to(loss_dtype), lse, empty({0}, at::kFloat, input.device())};
  }
  const Tensor loss = empty({}, loss_dtype, input.device());
  const Tensor scale = empty({}, at::kFloat, input.device());
  const Memory memory = lender.memory();
  lender.launch(MEAN, {.losses = losses.const_data_ptr<float>(),
                       .target = classes.const_data_ptr<int64_t>(),
                       .loss = loss.mutable_data_ptr(),
                       .scale = scale.mutable_data_ptr<float>(),
                       .M = M,
                       .ignore_index = ignore_index,
                       .dtype = dtype_of(loss_dtype),
                       .mean = reduction == at::Reduction::Mean,
                       .memory = &memory,
                       .stream = lender.stream()});
  return {loss, lse, scale};
}

// PyTorch's own: what was written for a GPU can be tried, traced and differentiated without one.
Losses cross_entropy_cpu(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                         double label_smoothing, bool fp32_loss) {
  check(input, target, reduction, label_smoothing, true);
  const at::ScalarType wide = at::toOpMathType(input.scalar_type());
  const Tensor logits = input.to(wide);
  const Tensor loss =
      at::cross_entropy_loss(logits, target, {}, reduction, ignore_index, label_smoothing).contiguous();
  const Tensor ignored = target == ignore_index;
  const Tensor lse = at::logsumexp(logits, class_dim(input)).masked_fill(ignored, 0).contiguous();
  Tensor scale = at::empty({0}, lse.options());
  if (reduction == at::Reduction::Sum) scale = at::ones({}, lse.options());
  if (reduction == at::Reduction::Mean) scale = ignored.logical_not().sum().to(wide).reciprocal();
  return {fp32_loss ? loss : loss.to(input.scalar_type()), lse, scale};
}

Losses cross_entropy_meta(const Tensor& input, const Tensor& target, int64_t, int64_t reduction,
                          double label_smoothing, bool fp32_loss) {
  check(input, target, reduction, label_smoothing, is_wide(input));
  const bool reduced = reduction != at::Reduction::None;
  const auto wide = input.options().dtype(at::toOpMathType(input.scalar_type()));
  const auto loss_options = fp32_loss ? wide : input.options();
  const Tensor loss =
      reduced ? at::empty({}, loss_options) : at::empty_symint(target.sym_sizes(), loss_options);
  return {loss, at::empty_symint(target.sym_sizes(), wide),
          reduced ? at::empty({}, wide) : at::empty({0}, wide)};
}

// -----------------------------------------------------------------------------------------------------------
// Backward
// -----------------------------------------------------------------------------------------------------------

void check_backward(const Tensor& dout, const Tensor& input, const Tensor& target, const Tensor& lse,
                    const Tensor& scale, int64_t reduction, double label_smoothing, bool wide) {
  check(input, target, reduction, label_smoothing, wide);
  const bool reduced = reduction != at::Reduction::None;
  const std::vector<c10::SymInt> none;
  const auto shape = reduced ? c10::SymIntArrayRef(none) : target.sym_sizes();
  TORCH_CHECK_VALUE(dout.sym_sizes() == shape, "dout has shape ", tuple(dout.sym_sizes()), ", must have ",
                    tuple(shape), " like the loss");
  TORCH_CHECK_VALUE(lse.sym_sizes() == target.sym_sizes(), "lse has shape ", tuple(lse.sym_sizes()),
                    ", must have that of target, ", tuple(target.sym_sizes()));
  require_dtype("lse", lse, {at::toOpMathType(input.scalar_type())});
  require_dtype("scale", scale, {at::toOpMathType(input.scalar_type())});
  for (const auto& [name, tensor] :
       {std::pair{"dout", &dout}, std::pair{"lse", &lse}, std::pair{"scale", &scale}}) {
    require_same_device(name, *tensor, "input", input);
  }
}

// out, rows stride_om apart, = the gradient of rows; dout: fp32, one number for each row, or for all of them.
void launch_backward(const Rows& rows, const Tensor& input, const Tensor& target, const Tensor& lse,
                     const Tensor& dout, void* out, int64_t stride_om, int64_t ignore_index,
                     double label_smoothing) {
  const Tensor classes = target.contiguous();
  const Tensor sums = lse.contiguous();
  const auto& step = first_that_runs<cross_entropy_backward_steps>(
      "cross_entropy_backward", {"v03_rows_per_block"}, false, input.get_device());
  step.launch({.logits = rows.data(),
               .target = classes.const_data_ptr<int64_t>(),
               .lse = sums.const_data_ptr<float>(),
               .dout = dout.const_data_ptr<float>(),
               .out = out,
               .M = target.numel(),
               .N = input.size(class_dim(input)),
               .stride_lm = rows.stride(),
               .stride_dm = dout.dim() > 0,
               .stride_om = stride_om,
               .ignore_index = ignore_index,
               .dtype = dtype_of(input),
               .smoothing = static_cast<float>(label_smoothing),
               .stream = c10::cuda::getCurrentCUDAStream()});
}

Tensor cross_entropy_backward_cuda(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   const Tensor& lse, const Tensor& scale, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing) {
  check_backward(dout, input, target, lse, scale, reduction, label_smoothing, false);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t dim = class_dim(input);
  const Tensor out = empty_rows(input, dim);
  if (out.numel() == 0) return out;
  // A row's gradient is that of its loss, or what it counts in the loss of all times that of all.
  const Tensor of_rows = reduction == at::Reduction::None ? dout.to(at::kFloat).reshape({-1}).contiguous()
                                                          : dout.to(at::kFloat).mul(scale);
  launch_backward(Rows(input, dim), input, target, lse, of_rows, out.mutable_data_ptr(), input.size(dim),
                  ignore_index, label_smoothing);
  return out;
}

// In operations that can be differentiated again, and that know nothing of lse and scale, which come from the
// same input and target.
Tensor cross_entropy_backward_aten(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   int64_t ignore_index, int64_t reduction, double label_smoothing) {
  const int64_t dim = class_dim(input);
  const auto n = input.sym_size(dim);
  const Tensor ignored = target == ignore_index;
  // As in the kernels, a target that is no class makes its row NaN, where scatter_add would end the process.
  const Tensor no_class = (target < 0).logical_or(target >= n);
  const Tensor wide = input.to(at::toOpMathType(input.scalar_type()));
  Tensor of_rows = dout.to(wide.scalar_type());
  if (reduction == at::Reduction::Mean) of_rows = of_rows / ignored.logical_not().sum();
  of_rows = of_rows.expand_symint(target.sym_sizes());
  of_rows = of_rows.masked_fill(no_class.logical_and(ignored.logical_not()), NAN);
  const Tensor p = at::softmax(wide, dim);
  const Tensor classes = target.masked_fill(no_class, 0).unsqueeze(dim);
  const Tensor shared = at::full_like(p, label_smoothing) / n;
  const Tensor wanted =
      shared.scatter_add(dim, classes, at::full_like(classes, 1 - label_smoothing, p.options()));
  const Tensor dx = (p - wanted) * of_rows.unsqueeze(dim);
  return dx.masked_fill(ignored.unsqueeze(dim), 0).to(input.scalar_type());
}

Tensor cross_entropy_backward_cpu(const Tensor& dout, const Tensor& input, const Tensor& target,
                                  const Tensor& lse, const Tensor& scale, int64_t ignore_index,
                                  int64_t reduction, double label_smoothing) {
  check_backward(dout, input, target, lse, scale, reduction, label_smoothing, true);
  const int64_t dim = class_dim(input);
  const Tensor dx =
      cross_entropy_backward_aten(dout, input, target, ignore_index, reduction, label_smoothing);
  return dx.movedim(dim, -1).contiguous().movedim(-1, dim);
}

Tensor cross_entropy_backward_meta(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   const Tensor& lse, const Tensor& scale, int64_t, int64_t reduction,
                                   double label_smoothing) {
  check_backward(dout, input, target, lse, scale, reduction, label_smoothing, is_wide(input));
  return empty_rows_meta(input, class_dim(input));
}

// -----------------------------------------------------------------------------------------------------------
// The gradient in the place of the logits
// -----------------------------------------------------------------------------------------------------------

void check_in_place(int64_t reduction) {
  TORCH_CHECK_VALUE(reduction == at::Reduction::Mean || reduction == at::Reduction::Sum, "reduction is ",
                    text(reduction),
                    ", must be 1 for mean or 2 for sum: of rows' losses there is no one gradient");
}

void check_place(bool overwritable, const Tensor& input) {
  TORCH_CHECK_VALUE(
      overwritable, "input has strides ", tuple(input.sym_strides()),
      ", must have rows of neighbouring classes, apart from each other and all equally far: take "
      "input.contiguous(), classes last");
}

// The same without a GPU, of sizes that may be symbols: only what is known to lie otherwise is refused.
bool may_be_overwritten(const Tensor& input) {
  const auto sizes = input.sym_sizes(), strides = input.sym_strides();
  const int64_t dim = class_dim(input);
  for (const auto& size : sizes) {
    if (TORCH_GUARD_OR_FALSE(size.sym_eq(0))) return true;
  }
  const auto single = [&](int64_t i) { return TORCH_GUARD_OR_FALSE(sizes[i].sym_eq(1)); };
  if (!single(dim) && TORCH_GUARD_OR_FALSE(strides[dim].sym_ne(1))) return false;
  std::optional<c10::SymInt> behind;  // how far the rows reach of the dimensions that were looked at
  for (int64_t i = input.dim() - 1; i >= 0; --i) {
    if (i == dim || single(i)) continue;
    const auto elsewhere = behind ? strides[i].sym_ne(*behind) : strides[i].sym_lt(sizes[dim]);
    if (TORCH_GUARD_OR_FALSE(elsewhere)) return false;
    behind = strides[i] * sizes[i];
  }
  return true;
}

Tensor cross_entropy_gradient_cuda(Tensor& input, const Tensor& target, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing, bool fp32_loss) {
  check_in_place(reduction);
  check(input, target, reduction, label_smoothing, false);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t dim = class_dim(input), M = target.numel();
  if (input.numel() > 0) {
    const Rows rows(input, dim);
    check_place(rows.data() == input.const_data_ptr() && (M == 1 || rows.stride() >= input.size(dim)), input);
  }
  const auto [loss, lse, scale] =
      cross_entropy_cuda(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
  if (input.numel() > 0) {
    const Rows rows(input, dim);
    launch_backward(rows, input, target, lse, scale, input.mutable_data_ptr(), rows.stride(), ignore_index,
                    label_smoothing);
  }
  return loss;
}

Tensor cross_entropy_gradient_cpu(Tensor& input, const Tensor& target, int64_t ignore_index,
                                  int64_t reduction, double label_smoothing, bool fp32_loss) {
  check_in_place(reduction);
  const Tensor loss =
      std::get<0>(cross_entropy_cpu(input, target, ignore_index, reduction, label_smoothing, fp32_loss));
  check_place(may_be_overwritten(input), input);
  const Tensor one = at::ones({}, input.options());
  input.copy_(cross_entropy_backward_aten(one, input, target, ignore_index, reduction, label_smoothing));
  return loss;
}

Tensor cross_entropy_gradient_meta(Tensor& input, const Tensor& target, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing, bool fp32_loss) {
  check_in_place(reduction);
  const Tensor loss =
      std::get<0>(cross_entropy_meta(input, target, ignore_index, reduction, label_smoothing, fp32_loss));
  check_place(may_be_overwritten(input), input);
  return loss;
}

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

Losses call_cross_entropy(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                          double label_smoothing, bool fp32_loss) {
  static const auto op = find_operator<decltype(call_cross_entropy)>("kernel_twins::cross_entropy");
  return op.call(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
}

// What the public function returns, and nothing else; see matmul/torch.cpp.
Tensor cross_entropy_result(const Tensor& input, const Tensor& target, int64_t ignore_index,
                            int64_t reduction, double label_smoothing) {
  return std::get<0>(call_cross_entropy(input, target, ignore_index, reduction, label_smoothing, false));
}

Tensor call_cross_entropy_backward(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   const Tensor& lse, const Tensor& scale, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing) {
  static const auto op =
      find_operator<decltype(call_cross_entropy_backward)>("kernel_twins::cross_entropy_backward");
  return below_autograd("cross_entropy_backward", {&dout}, [&] {
    return op.call(dout, input, target, lse, scale, ignore_index, reduction, label_smoothing);
  });
}

Tensor call_cross_entropy_gradient(Tensor& input, const Tensor& target, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing, bool fp32_loss) {
  static const auto op =
      find_operator<decltype(call_cross_entropy_gradient)>("kernel_twins::cross_entropy_gradient_");
  return op.call(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static constexpr const char* NAME = "CrossEntropyBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dout = gradients[0];
    Tensor dx;
    if (dout.defined()) {
      const auto saved = context->get_saved_variables();
      const int64_t ignore_index = context->saved_data["ignore_index"].toInt();
      const int64_t reduction = context->saved_data["reduction"].toInt();
      const double label_smoothing = context->saved_data["label_smoothing"].toDouble();
      dx = at::GradMode::is_enabled()
               ? cross_entropy_backward_aten(dout, saved[0], saved[1], ignore_index, reduction,
                                             label_smoothing)
               : call_cross_entropy_backward(dout, saved[0], saved[1], saved[2], saved[3], ignore_index,
                                             reduction, label_smoothing);
    }
    return {dx};
  }
};

Losses cross_entropy_autograd(const Tensor& input, const Tensor& target, int64_t ignore_index,
                              int64_t reduction, double label_smoothing, bool fp32_loss) {
  const Losses out = below_autograd("cross_entropy", {&input}, [&] {
    return call_cross_entropy(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
  });
  if (compute_requires_grad(input)) {
    const auto& [loss, lse, scale] = out;  // no gradient flows through lse and scale
    record<CrossEntropyFunction>({&input}, {&loss}, [&](AutogradContext& context) {
      context.save_for_backward({input, target, lse, scale});
      context.saved_data["ignore_index"] = ignore_index;
      context.saved_data["reduction"] = reduction;
      context.saved_data["label_smoothing"] = label_smoothing;
    });
  }
  return out;
}

Tensor cross_entropy_gradient_autograd(Tensor& input, const Tensor& target, int64_t ignore_index,
                                       int64_t reduction, double label_smoothing, bool fp32_loss) {
  TORCH_CHECK(!at::GradMode::is_enabled() || !input.requires_grad(),
              "input requires grad, and cross_entropy_gradient_ overwrites it without a derivative: call it "
              "under torch.no_grad(), or with input.detach()");
  const Tensor loss = below_autograd("cross_entropy_gradient_", {&input}, [&] {
    return call_cross_entropy_gradient(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
  });
  mark_written(input);
  return loss;
}

// PyTorch widens the logits first. Here they stay as they are, and the loss is float32 all the same.
Losses cross_entropy_autocast(const Tensor& input, const Tensor& target, int64_t ignore_index,
                              int64_t reduction, double label_smoothing, bool) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_cross_entropy(input, target, ignore_index, reduction, label_smoothing, true);
}

Tensor cross_entropy_gradient_autocast(Tensor& input, const Tensor& target, int64_t ignore_index,
                                       int64_t reduction, double label_smoothing, bool) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_cross_entropy_gradient(input, target, ignore_index, reduction, label_smoothing, true);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  const auto define = [&](const char* schema) { library.def(schema, {at::Tag::pt2_compliant_tag}); };
  // reduction: 0 for none, 1 for mean, 2 for sum.
  define(
      "cross_entropy(Tensor input, Tensor target, int ignore_index=-100, int reduction=1, "
      "float label_smoothing=0.0, bool fp32_loss=False) -> (Tensor loss, Tensor lse, Tensor scale)");
  define(
      "cross_entropy_result(Tensor input, Tensor target, int ignore_index, int reduction, "
      "float label_smoothing) -> Tensor loss");
  // What its gradient is made of.
  define(
      "cross_entropy_backward(Tensor dout, Tensor input, Tensor target, Tensor lse, Tensor scale, "
      "int ignore_index, int reduction, float label_smoothing) -> Tensor");
  define(
      "cross_entropy_gradient_(Tensor(a!) input, Tensor target, int ignore_index=-100, int reduction=1, "
      "float label_smoothing=0.0, bool fp32_loss=False) -> Tensor");
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("cross_entropy", cross_entropy_cuda);
  library.impl("cross_entropy_backward", cross_entropy_backward_cuda);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("cross_entropy", cross_entropy_cpu);
  library.impl("cross_entropy_backward", cross_entropy_backward_cpu);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_cpu);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("cross_entropy", cross_entropy_meta);
  library.impl("cross_entropy_backward", cross_entropy_backward_meta);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("cross_entropy", cross_entropy_autograd);
  library.impl("cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_autograd);
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) {
  library.impl("cross_entropy", cross_entropy_autocast);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_autocast);
}
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("cross_entropy_result", cross_entropy_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // or vmap would go example by example
  library.impl("cross_entropy_result", cross_entropy_result);
}
