// The steps of softmax and softmax_backward, and the operators behind kernel_twins.softmax and log_softmax.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>

#include "softmax/softmax/args.h"
#include "softmax/softmax_backward/args.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/rows.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// Limits of GPUs without clusters, in bytes of a row: the second step behind each function holds rows up to
// here in registers, and the third reads longer rows twice.
constexpr int64_t ROW_IN_REGISTERS = 64 * 1024;
constexpr int64_t PAIR_IN_REGISTERS = 32 * 1024;  // of dout and y each

// -----------------------------------------------------------------------------------------------------------
// Steps
// -----------------------------------------------------------------------------------------------------------

void softmax_step(const std::string& step, const Tensor& x, const Tensor& out, bool log) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("softmax", softmax_steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.x = x.const_data_ptr(),
                        .out = out.mutable_data_ptr(),
                        .M = x.size(0),
                        .N = x.size(1),
                        .stride_xm = x.stride(0),
                        .dtype = dtype_of(x),
                        .log = log,
                        .memory = &memory,
                        .stream = lender.stream()});
  mark_written(out);
}

void softmax_backward_step(const std::string& step, const Tensor& dout, const Tensor& y, const Tensor& out,
                           bool log) {
  const c10::cuda::CUDAGuard guard(dout.device());
  const auto& found = find_step("softmax_backward", softmax_backward_steps, step, dout);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.dout = dout.const_data_ptr(),
                        .y = y.const_data_ptr(),
                        .out = out.mutable_data_ptr(),
                        .M = dout.size(0),
                        .N = dout.size(1),
                        .stride_dm = dout.stride(0),
                        .stride_ym = y.stride(0),
                        .dtype = dtype_of(dout),
                        .log = log,
                        .memory = &memory,
                        .stream = lender.stream()});
  mark_written(out);
}

// -----------------------------------------------------------------------------------------------------------
// The dimension along which rows lie
// -----------------------------------------------------------------------------------------------------------

// Returns dim counted from the front. A 0-d tensor is a row of one element, as in PyTorch.
int64_t counted(int64_t dim, const char* name, int64_t rank) {
  const int64_t dims = std::max(rank, int64_t{1});
  TORCH_CHECK_INDEX(-dims <= dim && dim < dims, "dim is ", text(dim), ", must be from ", text(-dims), " to ",
                    text(dims - 1), ": ", name, " has ", text(rank), " dimensions");
  return dim < 0 ? dim + dims : dim;
}

int64_t row_length(const Tensor& tensor, int64_t dim) { return tensor.dim() == 0 ? 1 : tensor.size(dim); }

// -----------------------------------------------------------------------------------------------------------
// Forward
// -----------------------------------------------------------------------------------------------------------

// Returns dim counted from the front. `wide`: PyTorch will compute, which also accepts float64.
int64_t check(const Tensor& x, int64_t dim, bool wide) {
  if (!(wide && x.scalar_type() == at::kDouble)) {
    require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  return counted(dim, "x", x.dim());
}

Tensor softmax_cuda(const Tensor& x, int64_t dim, bool log) {
  dim = check(x, dim, false);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = empty_rows(x, dim);
  if (out.numel() == 0) return out;
  const Rows rows(x, dim);
  const int64_t N = row_length(x, dim);
  const bool large = N * x.itemsize() > ROW_IN_REGISTERS;
  const auto& step = first_that_runs<softmax_steps>("softmax", x.get_device(), large ? SECOND : NONE);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(step, {.x = rows.data(),
                       .out = out.mutable_data_ptr(),
                       .M = out.numel() / N,
                       .N = N,
                       .stride_xm = rows.stride(),
                       .dtype = dtype_of(x),
                       .log = log,
                       .memory = &memory,
                       .stream = lender.stream()});
  return out;
}

// On the CPU, PyTorch computes: code for a GPU can be tried, traced and differentiated without one.
Tensor softmax_cpu(const Tensor& x, int64_t dim, bool log) {
  dim = check(x, dim, true);
  const Tensor rows = x.movedim(dim, -1);
  return (log ? at::log_softmax(rows, -1) : at::softmax(rows, -1)).contiguous().movedim(-1, dim);
}

Tensor softmax_meta(const Tensor& x, int64_t dim, bool) {
  return empty_rows_meta(x, check(x, dim, is_wide(x)));
}

// -----------------------------------------------------------------------------------------------------------
// Backward: dx from dout and from y, what the forward pass returned
// -----------------------------------------------------------------------------------------------------------

int64_t check_backward(const Tensor& dout, const Tensor& y, int64_t dim, bool wide) {
  if (!(wide && dout.scalar_type() == at::kDouble)) {
    require_dtype("dout", dout, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  require_same_dtype("y", y, "dout", dout);
  require_same_device("y", y, "dout", dout);
  TORCH_CHECK_VALUE(y.sym_sizes() == dout.sym_sizes(), "y has shape ", tuple(y.sym_sizes()),
                    ", must have that of dout, ", tuple(dout.sym_sizes()));
  return counted(dim, "dout", dout.dim());
}

Tensor softmax_backward_cuda(const Tensor& dout, const Tensor& y, int64_t dim, bool log) {
  dim = check_backward(dout, y, dim, false);
  const c10::cuda::CUDAGuard guard(dout.device());
  Tensor out = empty_rows(dout, dim);
  if (out.numel() == 0) return out;
  const Rows dout_rows(dout, dim);
  const Rows y_rows(y, dim);
  const int64_t N = row_length(dout, dim);
  const bool large = N * dout.itemsize() > PAIR_IN_REGISTERS;
  const auto& step =
      first_that_runs<softmax_backward_steps>("softmax_backward", dout.get_device(), large ? SECOND : NONE);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(step, {.dout = dout_rows.data(),
                       .y = y_rows.data(),
                       .out = out.mutable_data_ptr(),
                       .M = out.numel() / N,
                       .N = N,
                       .stride_dm = dout_rows.stride(),
                       .stride_ym = y_rows.stride(),
                       .dtype = dtype_of(dout),
                       .log = log,
                       .memory = &memory,
                       .stream = lender.stream()});
  return out;
}

// The gradient in PyTorch operations, which can be differentiated again.
Tensor softmax_backward_aten(const Tensor& dout, const Tensor& y, int64_t dim, bool log) {
  return log ? at::_log_softmax_backward_data(dout, y, dim, y.scalar_type())
             : at::_softmax_backward_data(dout, y, dim, y.scalar_type());
}

Tensor softmax_backward_cpu(const Tensor& dout, const Tensor& y, int64_t dim, bool log) {
  dim = check_backward(dout, y, dim, true);
  return softmax_backward_aten(dout.movedim(dim, -1), y.movedim(dim, -1), -1, log)
      .contiguous()
      .movedim(-1, dim);
}

Tensor softmax_backward_meta(const Tensor& dout, const Tensor& y, int64_t dim, bool) {
  return empty_rows_meta(dout, check_backward(dout, y, dim, is_wide(dout)));
}

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

Tensor call_softmax(const Tensor& x, int64_t dim, bool log) {
  static const auto op = find_operator<decltype(call_softmax)>("kernel_twins::softmax");
  return op.call(x, dim, log);
}

Tensor call_softmax_backward(const Tensor& dout, const Tensor& y, int64_t dim, bool log) {
  static const auto op = find_operator<decltype(call_softmax_backward)>("kernel_twins::softmax_backward");
  return below_autograd("softmax_backward", {&dout}, [&] { return op.call(dout, y, dim, log); });
}

class SoftmaxFunction : public torch::autograd::Function<SoftmaxFunction> {
 public:
  static constexpr const char* NAME = "SoftmaxBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dout = gradients[0];
    if (!dout.defined()) return {Tensor()};
    const Tensor y = context->get_saved_variables()[0];
    const int64_t dim = context->saved_data["dim"].toInt();
    const bool log = context->saved_data["log"].toBool();
    const auto dx = at::GradMode::is_enabled() ? softmax_backward_aten : call_softmax_backward;
    return {dx(dout, y, dim, log)};
  }
};

Tensor softmax_autograd(const Tensor& x, int64_t dim, bool log) {
  const Tensor y = below_autograd("softmax", {&x}, [&] { return call_softmax(x, dim, log); });
  if (compute_requires_grad(x)) {
    record<SoftmaxFunction>({&x}, {&y}, [&](AutogradContext& context) {
      context.save_for_backward({y});
      context.saved_data["dim"] = dim;
      context.saved_data["log"] = log;
    });
  }
  return y;
}

// As in PyTorch's autocast, half precision is widened to fp32, and so is the result.
Tensor softmax_autocast(const Tensor& x, int64_t dim, bool log) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_softmax(at::autocast::cached_cast(at::kFloat, x, c10::DeviceType::CUDA), dim, log);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def("softmax(Tensor x, int dim=-1, bool log=False) -> Tensor", {at::Tag::pt2_compliant_tag});
  // The operator of softmax's gradient.
  library.def("softmax_backward(Tensor dout, Tensor y, int dim, bool log=False) -> Tensor",
              {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("softmax", softmax_cuda);
  library.impl("softmax_backward", softmax_backward_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("softmax", softmax_cpu);
  library.impl("softmax_backward", softmax_backward_cpu);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("softmax", softmax_meta);
  library.impl("softmax_backward", softmax_backward_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("softmax", softmax_autograd);
  library.impl("softmax_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) { library.impl("softmax", softmax_autocast); }

void register_softmax(pybind11::module_& module) {
  define_steps(
      module, "softmax", softmax_step,
      "out = softmax(x) over the rows, or its logarithm. x: [M, N], rows contiguous, fp32, bf16 or fp16; "
      "out: [M, N], contiguous, of x's dtype.",
      arg("x"), kw_only(), arg("out"), arg("log") = false);
  define_steps(
      module, "softmax_backward", softmax_backward_step,
      "out = the gradient of x from dout and softmax's result y, or log_softmax's. dout, y: [M, N], rows "
      "contiguous, fp32, bf16 or fp16 alike; out: [M, N], contiguous.",
      arg("dout"), arg("y"), kw_only(), arg("out"), arg("log") = false);
}
