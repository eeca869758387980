// Registration of a family's steps in Python: kernel_twins._C.<op>(step, *inputs, out=..., **options).
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <variant>
#include <vector>

#include "architecture.h"
#include "launch.h"

namespace kernel_twins {

using pybind11::arg;
using pybind11::kw_only;
using Out = std::variant<Tensor, std::vector<Tensor>>;  // Tensor first: it converts to a list, too

inline std::vector<Tensor> tensors_of(const Out& out) {
  if (const auto* one = std::get_if<Tensor>(&out)) return {*one};
  return std::get<std::vector<Tensor>>(out);
}

// The step of that name. Throws if there is none, or if the device of `on` cannot run it.
template <typename Args>
const Step<Args>& find_step(const char* op, const StepTable<Args>& steps, const std::string& name,
                            const Tensor& on) {
  const Step<Args>* step = steps.find(name);
  if (!step) {
    std::string names;
    for (const Step<Args>* known = steps.begin; known != steps.end; ++known) {
      names += (names.empty() ? "" : ", ") + std::string(known->name);
    }
    TORCH_CHECK_VALUE(false, "step is '", name, "'; ", op, " has ", names);
  }
  const std::string refusal = architecture_refusal(op, name, step->arch, on.get_device());
  TORCH_CHECK(refusal.empty(), refusal);
  return *step;
}

// Defines the module's function `op`, which calls an adaptor with a step's name and its arguments. Python's
// check by the operation's spec comes first on every call, so an adaptor only fills the launcher's arguments.
template <typename Adaptor, typename... Arguments>
void define_steps(pybind11::module_& module, const char* op, Adaptor* adaptor, const char* doc,
                  const Arguments&... arguments) {
  // Turns torch's errors into TypeError, ValueError and OutOfMemoryError.
  const pybind11::cpp_function launch(torch::wrap_pybind_function(adaptor), pybind11::name(op), doc,
                                      arg("step"), arguments...);
  const auto call = [op, launch](const pybind11::args& inputs, const pybind11::kwargs& options) {
    pybind11::module_::import("kernel_twins.harness.load").attr("require")(op, "cuda", *inputs, **options);
    launch(*inputs, **options);
  };
  pybind11::options signatures;
  signatures.disable_function_signatures();  // the doc of `launch` has the signature already
  module.def(op, call, launch.doc().cast<std::string>().c_str());
}

}  // namespace kernel_twins
