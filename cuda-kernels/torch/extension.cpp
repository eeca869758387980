// The part of kernel_twins._C that belongs to no family: the architectures it was built for, and the hardware
// survey's probes.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

#include "checks.h"
#include "choices.h"
#include "ladder.h"
#include "probes.h"
#include "steps.h"

namespace {

using namespace kernel_twins;

void probe(const std::string& name, const Tensor& buffer, int64_t iterations) {
  require_dtype("buffer", buffer, {at::kByte});
  TORCH_CHECK_VALUE(buffer.is_cuda(), "buffer is on ", buffer.device().str(),
                    ", must be on a CUDA device: call buffer.cuda()");
  TORCH_CHECK_VALUE(buffer.is_contiguous(), "buffer has strides ", tuple(buffer.strides()),
                    ", must be contiguous: call buffer.contiguous()");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % 16 == 0,
                    "buffer starts at an address that is not a multiple of 16: do not slice it");
  TORCH_CHECK_VALUE(iterations >= 0, "iterations is ", text(iterations), ", must be at least 0");

  const c10::cuda::CUDAGuard guard(buffer.device());
  const auto& found = find_step("probe", probe_steps, name, buffer);
  found.launch({.buffer = buffer.mutable_data_ptr(),
                .bytes = buffer.numel(),
                .iterations = iterations,
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(buffer);
}

bool step_runs(const std::string& arch, std::pair<int, int> capability, const std::string& architectures) {
  return runs_step(arch, capability, parse_architectures(architectures));
}

bool has(const std::string& op, const std::string& step) { return launchable.contains({op, step}); }

}  // namespace

void kernel_twins::require_built(const std::string& op, const std::string& step) {
  const pybind11::gil_scoped_acquire gil;
  pybind11::module_::import("kernel_twins.built").attr("require_built")(op, step);
}

void register_extension(pybind11::module_& module) {
  using torch::wrap_pybind_function;
  module.doc() =
      "The CUDA steps. Each function launches the named step on the current stream and writes into out.";
  module.attr("architectures") = KERNEL_TWINS_ARCHS;
  module.def("runs", wrap_pybind_function(step_runs), arg("arch"), arg("capability"), arg("architectures"),
             "Whether a GPU of that compute capability runs a step of that arch, such as >=9.0, compiled for "
             "architectures, a list such as 8.0;9.0a.");
  module.def(
      "has", has, arg("op"), arg("step"),
      "Whether a step, or a baseline that is compiled beside the steps, can be launched: it is in this "
      "module, or importing kernel_twins._ladder has added it.");
  module.def(
      "kept", kept, arg("choose"),
      "A function of the same positional arguments that returns what choose returned for a call of equal "
      "dtypes, sizes, strides and settings of PyTorch. It asks choose for all others, and for calls under "
      "transforms and modes.");
  module.def(
      "ask_anew", ask_anew, arg("anew"),
      "Whether this thread's calls of kept functions ask choose each time; returns what was set before.");
  module.def("probe", wrap_pybind_function(probe), arg("name"), arg("buffer"), arg("iterations"),
             "Launches a probe of hardware-survey/probes.h. buffer: contiguous uint8, overwritten.");
}
