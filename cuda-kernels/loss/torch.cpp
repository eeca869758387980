// The steps of cross_entropy and its backward pass, and the operator behind kernel_twins.cross_entropy.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "loss/cross_entropy/args.h"
#include "loss/cross_entropy/few.h"
#include "loss/cross_entropy/mean.h"
#include "loss/cross_entropy_backward/args.h"
#include "operators.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/steps.h"

using at::Tensor;
using namespace kernel_twins;

namespace {

// Most classes that the steps can count in 32 bits, forward and backward.
constexpr int64_t MOST_CLASSES = (int64_t{1} << 31) - (int64_t{1} << 15);

constexpr Step<CrossEntropyArgs> FEW = {"few", cross_entropy_few, ">=8.0"};
constexpr Step<CrossEntropyMeanArgs> MEAN = {"mean", cross_entropy_mean, ">=8.0"};

// -----------------------------------------------------------------------------------------------------------
// Steps
// -----------------------------------------------------------------------------------------------------------

void cross_entropy_step(const std::string& step, const Tensor& logits, const Tensor& target, const Out& out,
                        int64_t ignore_index, double label_smoothing) {
  const std::vector<Tensor> outs = tensors_of(out);
  const c10::cuda::CUDAGuard guard(logits.device());
  const auto& found = find_step("cross_entropy", cross_entropy_steps, step, logits);
  found.launch({.logits = logits.const_data_ptr(),
                .target = target.const_data_ptr<int64_t>(),
                .losses = outs[0].mutable_data_ptr<float>(),
                .lse = outs.size() > 1 ? outs[1].mutable_data_ptr<float>() : nullptr,
                .M = logits.size(0),
                .N = logits.size(1),
                .stride_lm = logits.stride(0),
                .ignore_index = ignore_index,
                .dtype = dtype_of(logits),
                .smoothing = static_cast<float>(label_smoothing),
                .stream = c10::cuda::getCurrentCUDAStream()});
  for (const Tensor& each : outs) mark_written(each);
}

void cross_entropy_backward_step(const std::string& step, const Tensor& logits, const Tensor& target,
                                 const Tensor& lse, const Tensor& dout, const Tensor& out,
                                 int64_t ignore_index, double label_smoothing) {
  const c10::cuda::CUDAGuard guard(logits.device());
  const auto& found = find_step("cross_entropy_backward", cross_entropy_backward_steps, step, logits);
  found.launch({.logits = logits.const_data_ptr(),
                .target = target.const_data_ptr<int64_t>(),
                .lse = lse.const_data_ptr<float>(),
                .dout = dout.const_data_ptr<float>(),
                .out = out.mutable_data_ptr(),
                .M = logits.size(0),
                .N = logits.size(1),
                .stride_lm = logits.stride(0),
                .stride_dm = dout.stride(0),
                .stride_om = logits.size(1),
                .ignore_index = ignore_index,
                .dtype = dtype_of(logits),
                .smoothing = static_cast<float>(label_smoothing),
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------
// The operator
// -----------------------------------------------------------------------------------------------------------

void kernel_twins::check(const Tensor& input, const Tensor& target, int64_t reduction, double label_smoothing,
                         bool wide) {
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

Losses kernel_twins::cross_entropy_cuda(const Tensor& input, const Tensor& target, int64_t ignore_index,
                                        int64_t reduction, double label_smoothing, bool fp32_loss) {
  check(input, target, reduction, label_smoothing, false);
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t dim = class_dim(input);
  const at::ScalarType loss_dtype = fp32_loss ? at::kFloat : input.scalar_type();
  const Tensor classes = target.contiguous();
  const Tensor losses = empty(target.sizes(), at::kFloat, input.device());
  const Tensor lse = empty(target.sizes(), at::kFloat, input.device());
  Lender lender;
  const Memory memory = lender.memory();
  const int64_t M = target.numel();
  if (M > 0) {
    const Rows rows(input, dim);
    const CrossEntropyArgs args = {.logits = rows.data(),
                                   .target = classes.const_data_ptr<int64_t>(),
                                   .losses = losses.mutable_data_ptr<float>(),
                                   .lse = lse.mutable_data_ptr<float>(),
                                   .M = M,
                                   .N = input.size(dim),
                                   .stride_lm = rows.stride(),
                                   .ignore_index = ignore_index,
                                   .dtype = dtype_of(input),
                                   .smoothing = static_cast<float>(label_smoothing),
                                   .stream = lender.stream(),
                                   .memory = &memory};
    const auto& step = first_that_runs<cross_entropy_steps>("cross_entropy", input.get_device());
    lender.launch(are_few_rows(args) ? FEW : step, args);
  }
  if (reduction == at::Reduction::None) {
    return {losses.to(loss_dtype), lse, empty({0}, at::kFloat, input.device())};
  }
  const Tensor loss = empty({}, loss_dtype, input.device());
  const Tensor scale = empty({}, at::kFloat, input.device());
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

// On the CPU, PyTorch computes: code for a GPU can be tried, traced and differentiated without one.
Losses kernel_twins::cross_entropy_cpu(const Tensor& input, const Tensor& target, int64_t ignore_index,
                                       int64_t reduction, double label_smoothing, bool fp32_loss) {
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

Losses kernel_twins::cross_entropy_meta(const Tensor& input, const Tensor& target, int64_t, int64_t reduction,
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

namespace {

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

Losses call_cross_entropy(const Tensor& input, const Tensor& target, int64_t ignore_index, int64_t reduction,
                          double label_smoothing, bool fp32_loss) {
  static const auto op = find_operator<decltype(call_cross_entropy)>("kernel_twins::cross_entropy");
  return op.call(input, target, ignore_index, reduction, label_smoothing, fp32_loss);
}

// The public function's result, the loss alone; see torch/operator.h.
Tensor cross_entropy_result(const Tensor& input, const Tensor& target, int64_t ignore_index,
                            int64_t reduction, double label_smoothing) {
  return std::get<0>(call_cross_entropy(input, target, ignore_index, reduction, label_smoothing, false));
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

// PyTorch's autocast widens the logits. Here they keep their dtype, and the loss is float32 as in PyTorch.
Losses cross_entropy_autocast(const Tensor& input, const Tensor& target, int64_t ignore_index,
                              int64_t reduction, double label_smoothing, bool) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_cross_entropy(input, target, ignore_index, reduction, label_smoothing, true);
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
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) { library.impl("cross_entropy", cross_entropy_cuda); }
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) { library.impl("cross_entropy", cross_entropy_cpu); }
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) { library.impl("cross_entropy", cross_entropy_meta); }
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) { library.impl("cross_entropy", cross_entropy_autograd); }
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) {
  library.impl("cross_entropy", cross_entropy_autocast);
}
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("cross_entropy_result", cross_entropy_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // otherwise vmap would loop over examples
  library.impl("cross_entropy_result", cross_entropy_result);
}

void register_loss(pybind11::module_& module) {
  define_steps(
      module, "cross_entropy", cross_entropy_step,
      "out = the cross entropy of the rows of logits and their target classes, or a tuple of that and of "
      "the logarithms of the sums of exponentials. logits: [M, N], rows contiguous, fp32, bf16 or fp16; "
      "target: [M], int64; out: [M], contiguous, fp32. 0 where the target is ignore_index.",
      arg("logits"), arg("target"), kw_only(), arg("out"), arg("ignore_index") = -100,
      arg("label_smoothing") = 0.0);
  define_steps(
      module, "cross_entropy_backward", cross_entropy_backward_step,
      "out = the gradient of logits through cross_entropy, from lse, which that returned, and dout. "
      "logits: [M, N], rows contiguous, fp32, bf16 or fp16; target: [M], int64; lse, dout: [M], fp32; "
      "out: [M, N], contiguous.",
      arg("logits"), arg("target"), arg("lse"), arg("dout"), kw_only(), arg("out"),
      arg("ignore_index") = -100, arg("label_smoothing") = 0.0);
}
