// Autograd for operators: calling kernels below it, and recording a call in its graph.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace kernel_twins {

using torch::autograd::AutogradContext;
using torch::autograd::compute_requires_grad;
using torch::autograd::variable_list;
using Tensors = std::initializer_list<const at::Tensor*>;  // undefined: absent

inline const at::Tensor* or_none(const std::optional<at::Tensor>& tensor) {
  static const at::Tensor none;
  return tensor ? &*tensor : &none;
}

// Returns call(), with operators dispatched below autograd. Throws if one of `tensors` has a forward-mode
// derivative, which would be lost there silently. Backward passes call their operators this way, too:
// PyTorch's autograd fallback also refuses forward mode, but boxes the arguments, which is slow.
template <typename Call>
auto below_autograd(const char* op, Tensors tensors, Call call) {
  for (const at::Tensor* tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor->defined() || !tensor->_fw_grad(/*level=*/0).defined(),
                                "kernel_twins::", op,
                                " has no forward-mode derivative: pass backend='torch'");
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call();
}

// The autograd node of a Function, which has NAME and backward(), and supports compiled autograd. name() is
// overridden because PyTorch's version demangles a type name on each pass.
template <typename Function>
struct RecordedCall : torch::autograd::CppNode<Function> {
  std::string name() const override { return Function::NAME; }
};

// Records a call in the graph; call it only if compute_requires_grad says so. `keep` saves in a context what
// Function::backward needs. backward gets one gradient for each defined output (undefined if none arrives)
// and returns one for each input (undefined if none is wanted).
//
// Does the work of torch::autograd::Function::apply, which handles inputs and outputs of any kind and takes
// the host longer. Here outputs are new: none is an input or a view of one.
template <typename Function, typename Keep>
void record(Tensors inputs, Tensors outputs, Keep keep) {
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) {
    transforms->checkSupportsCppAutogradFunction();
  }
  const std::shared_ptr<torch::autograd::CppNode<Function>> node(new RecordedCall<Function>(),
                                                                 torch::autograd::deleteNode);
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const at::Tensor* input : inputs) {
    edges.push_back(input->defined() ? torch::autograd::impl::gradient_edge(*input)
                                     : torch::autograd::Edge());
  }
  node->set_next_edges(std::move(edges));
  node->is_variable_input_.assign(inputs.size(), true);
  for (const at::Tensor* output : outputs) {
    if (output->defined()) torch::autograd::set_history(*output, node);
  }
  node->set_ctx_grad_fn(node);
  node->ctx_.set_materialize_grads(false);
  try {
    keep(node->ctx_);
    node->save_variables_to_ctx();
  } catch (...) {
    // A saved-tensor hook may throw, as checkpoint's does once nothing is left to recompute. Without this
    // clean-up, output, node and context would keep each other alive.
    node->ctx_.save_for_backward({});
    node->release_variables();
    throw;
  }
}

}  // namespace kernel_twins
