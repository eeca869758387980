// The steps of layer_norm and rms_norm, forward and backward.
#include <optional>
#include <string>
#include <vector>

#include "norm/layer_norm/args.h"
#include "norm/layer_norm_backward/args.h"
#include "norm/rms_norm/args.h"
#include "norm/rms_norm_backward/args.h"
#include "torch/steps.h"

namespace {

using namespace kernel_twins;

// Only layer_norm has a bias, and a mean in out; `centered` says that the step is layer_norm's.
void norm(const char* op, const StepTable<NormArgs>& steps, bool centered, const std::string& step,
          const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
          const OptionalTensor& residual, const Out& out, double eps) {
  const std::vector<Tensor> outs = tensors_of(out);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step(op, steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.x = x.const_data_ptr(),
                        .residual = data_or_null(residual),
                        .weight = data_or_null(weight),
                        .bias = data_or_null(bias),
                        .out = outs[0].mutable_data_ptr(),
                        .added = residual ? outs.back().mutable_data_ptr() : nullptr,
                        .mean = centered ? outs[1].mutable_data_ptr<float>() : nullptr,
                        .rstd = outs[centered ? 2 : 1].mutable_data_ptr<float>(),
                        .M = x.size(0),
                        .N = x.size(1),
                        .stride_xm = x.stride(0),
                        .stride_rm = residual ? residual->stride(0) : 0,
                        .dtype = dtype_of(x),
                        .eps = static_cast<float>(eps),
                        .memory = &memory,
                        .stream = lender.stream()});
  for (const Tensor& each : outs) mark_written(each);
}

void layer_norm(const std::string& step, const Tensor& x, const OptionalTensor& weight,
                const OptionalTensor& bias, const OptionalTensor& residual, const Out& out, double eps) {
  norm("layer_norm", layer_norm_steps, true, step, x, weight, bias, residual, out, eps);
}

void rms_norm(const std::string& step, const Tensor& x, const OptionalTensor& weight,
              const OptionalTensor& residual, const Out& out, double eps) {
  norm("rms_norm", rms_norm_steps, false, step, x, weight, std::nullopt, residual, out, eps);
}

// Only layer_norm has a mean, and dbias where there is a weight.
void norm_backward(const char* op, const StepTable<NormBackwardArgs>& steps, const std::string& step,
                   const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                   const OptionalTensor& weight, const OptionalTensor& dadded, const Out& out) {
  const std::vector<Tensor> outs = tensors_of(out);
  const c10::cuda::CUDAGuard guard(dout.device());
  const auto& found = find_step(op, steps, step, dout);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.dout = dout.const_data_ptr(),
                        .x = x.const_data_ptr(),
                        .weight = data_or_null(weight),
                        .dadded = data_or_null(dadded),
                        .mean = mean ? mean->const_data_ptr<float>() : nullptr,
                        .rstd = rstd.const_data_ptr<float>(),
                        .dx = outs[0].mutable_data_ptr(),
                        .dweight = weight ? outs[1].mutable_data_ptr() : nullptr,
                        .dbias = weight && mean ? outs[2].mutable_data_ptr() : nullptr,
                        .M = dout.size(0),
                        .N = dout.size(1),
                        .stride_dm = dout.stride(0),
                        .stride_xm = x.stride(0),
                        .stride_am = dadded ? dadded->stride(0) : 0,
                        .dtype = dtype_of(dout),
                        .memory = &memory,
                        .stream = lender.stream()});
  for (const Tensor& each : outs) mark_written(each);
}

void layer_norm_backward(const std::string& step, const Tensor& dout, const Tensor& x, const Tensor& mean,
                         const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& dadded,
                         const Out& out) {
  norm_backward("layer_norm_backward", layer_norm_backward_steps, step, dout, x, mean, rstd, weight, dadded,
                out);
}

void rms_norm_backward(const std::string& step, const Tensor& dout, const Tensor& x, const Tensor& rstd,
                       const OptionalTensor& weight, const OptionalTensor& dadded, const Out& out) {
  norm_backward("rms_norm_backward", rms_norm_backward_steps, step, dout, x, std::nullopt, rstd, weight,
                dadded, out);
}

}  // namespace

void register_norm(pybind11::module_& module) {
  const auto none = pybind11::none();
  define_steps(
      module, "layer_norm", layer_norm,
      "out = (x - mean) * rstd * weight + bias over the rows, mean, rstd, and with a residual x + residual, "
      "of which the rest then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight, bias: "
      "[N]; out: [M, N] and [M], contiguous, of x's dtype and fp32.",
      arg("x"), arg("weight") = none, arg("bias") = none, arg("residual") = none, kw_only(), arg("out"),
      arg("eps") = 1e-5);
  define_steps(
      module, "layer_norm_backward", layer_norm_backward,
      "out = the gradients of x, weight and bias through layer_norm, without a weight that of x alone. "
      "dout, x, dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; mean, rstd: [M], fp32; weight: "
      "[N]; out: [M, N] and [N], contiguous. dadded, the sum's own gradient, is added to x's.",
      arg("dout"), arg("x"), arg("mean"), arg("rstd"), arg("weight") = none, arg("dadded") = none, kw_only(),
      arg("out"));
  define_steps(
      module, "rms_norm", rms_norm,
      "out = x * rstd * weight over the rows, rstd, and with a residual x + residual, of which the rest "
      "then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight: [N]; out: [M, N] and [M], "
      "contiguous, of x's dtype and fp32.",
      arg("x"), arg("weight") = none, arg("residual") = none, kw_only(), arg("out"), arg("eps") = 1e-6);
  define_steps(
      module, "rms_norm_backward", rms_norm_backward,
      "out = the gradients of x and weight through rms_norm, without a weight that of x alone. dout, x, "
      "dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; rstd: [M], fp32; weight: [N]; out: [M, N] "
      "and [N], contiguous. dadded, the sum's own gradient, is added to x's.",
      arg("dout"), arg("x"), arg("rstd"), arg("weight") = none, arg("dadded") = none, kw_only(), arg("out"));
}
