// The operator of cross_entropy's gradient, and the one that overwrites the logits with it.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "loss/cross_entropy_backward/args.h"
#include "operators.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"

using at::Tensor;
using namespace kernel_twins;

namespace {

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

// Launches the gradient of rows into out, with rows stride_om apart. dout: fp32 or of the input's dtype, a
// vector of a number for each row, or one number for all; `scale`, if not null, is what it is multiplied by.
void launch_backward(const Rows& rows, const Tensor& input, const Tensor& target, const Tensor& lse,
                     const Tensor& dout, const float* scale, void* out, int64_t stride_om,
                     int64_t ignore_index, double label_smoothing) {
  const Tensor classes = target.contiguous();
  const Tensor sums = lse.contiguous();
  const auto& step =
      first_that_runs<cross_entropy_backward_steps>("cross_entropy_backward", input.get_device());
  step.launch({.logits = rows.data(),
               .target = classes.const_data_ptr<int64_t>(),
               .lse = sums.const_data_ptr<float>(),
               .dout = dout.const_data_ptr(),
               .out = out,
               .M = target.numel(),
               .N = input.size(class_dim(input)),
               .stride_lm = rows.stride(),
               .stride_dm = dout.dim() > 0 ? dout.stride(0) : 0,
               .stride_om = stride_om,
               .ignore_index = ignore_index,
               .dtype = dtype_of(input),
               .smoothing = static_cast<float>(label_smoothing),
               .stream = c10::cuda::getCurrentCUDAStream(),
               .dout_dtype = dtype_of(dout),
               .scale = scale});
}

Tensor cross_entropy_backward_cuda(const Tensor& dout, const Tensor& input, const Tensor& target,
                                   const Tensor& lse, const Tensor& scale, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing) {
  check_backward(dout, input, target, lse, scale, reduction, label_smoothing, false);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t dim = class_dim(input);
  const Tensor out = empty_rows(input, dim);
  if (out.numel() == 0) return out;
  // The gradient of each row's loss: dout itself, or dout times the weight of a row in the total. The kernel
  // multiplies, and widens a dout of the input's dtype: launches for that would take longer than small
  // inputs.
  const bool reduced = reduction != at::Reduction::None;
  const Tensor known = dout.scalar_type() == input.scalar_type() ? dout : dout.to(at::kFloat);
  launch_backward(Rows(input, dim), input, target, lse, reduced ? known : known.reshape({-1}),
                  reduced ? scale.const_data_ptr<float>() : nullptr, out.mutable_data_ptr(), input.size(dim),
                  ignore_index, label_smoothing);
  return out;
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

// The same check without a GPU, for sizes that may be symbolic: refuses only what is known to be wrong.
bool may_be_overwritten(const Tensor& input) {
  const auto sizes = input.sym_sizes(), strides = input.sym_strides();
  const int64_t dim = class_dim(input);
  for (const auto& size : sizes) {
    if (TORCH_GUARD_OR_FALSE(size.sym_eq(0))) return true;
  }
  const auto single = [&](int64_t i) { return TORCH_GUARD_OR_FALSE(sizes[i].sym_eq(1)); };
  if (!single(dim) && TORCH_GUARD_OR_FALSE(strides[dim].sym_ne(1))) return false;
  std::optional<c10::SymInt> behind;  // extent of the rows in the dimensions seen so far
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
    launch_backward(rows, input, target, lse, scale, nullptr, input.mutable_data_ptr(), rows.stride(),
                    ignore_index, label_smoothing);
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
// Autograd and autocast
// -----------------------------------------------------------------------------------------------------------

Tensor call_cross_entropy_gradient(Tensor& input, const Tensor& target, int64_t ignore_index,
                                   int64_t reduction, double label_smoothing, bool fp32_loss) {
  static const auto op =
      find_operator<decltype(call_cross_entropy_gradient)>("kernel_twins::cross_entropy_gradient_");
  return op.call(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
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

Tensor cross_entropy_gradient_autocast(Tensor& input, const Tensor& target, int64_t ignore_index,
                                       int64_t reduction, double label_smoothing, bool) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_cross_entropy_gradient(input, target, ignore_index, reduction, label_smoothing, true);
}

}  // namespace

Tensor kernel_twins::cross_entropy_backward_aten(const Tensor& dout, const Tensor& input,
                                                 const Tensor& target, int64_t ignore_index,
                                                 int64_t reduction, double label_smoothing) {
  const int64_t dim = class_dim(input);
  const auto n = input.sym_size(dim);
  const Tensor ignored = target == ignore_index;
  // As in the kernels, a target that is no class makes its row NaN; scatter_add would abort the process.
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

Tensor kernel_twins::call_cross_entropy_backward(const Tensor& dout, const Tensor& input,
                                                 const Tensor& target, const Tensor& lse, const Tensor& scale,
                                                 int64_t ignore_index, int64_t reduction,
                                                 double label_smoothing) {
  static const auto op =
      find_operator<decltype(call_cross_entropy_backward)>("kernel_twins::cross_entropy_backward");
  return below_autograd("cross_entropy_backward", {&dout}, [&] {
    return op.call(dout, input, target, lse, scale, ignore_index, reduction, label_smoothing);
  });
}

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  const auto define = [&](const char* schema) { library.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "cross_entropy_backward(Tensor dout, Tensor input, Tensor target, Tensor lse, Tensor scale, "
      "int ignore_index, int reduction, float label_smoothing) -> Tensor");
  define(
      "cross_entropy_gradient_(Tensor(a!) input, Tensor target, int ignore_index=-100, int reduction=1, "
      "float label_smoothing=0.0, bool fp32_loss=False) -> Tensor");
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("cross_entropy_backward", cross_entropy_backward_cuda);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("cross_entropy_backward", cross_entropy_backward_cpu);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_cpu);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("cross_entropy_backward", cross_entropy_backward_meta);
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_autograd);
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) {
  library.impl("cross_entropy_gradient_", cross_entropy_gradient_autocast);
}
