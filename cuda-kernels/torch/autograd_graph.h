// What operators have to do with autograd: how they are called below it, and how its graph takes a call in.
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
using Tensors = std::initializer_list<const at::Tensor*>;  // undefined: not there

inline const at::Tensor* or_none(const std::optional<at::Tensor>& tensor) {
  static const at::Tensor none;
  return tensor ? &*tensor : &none;
}

// Returns call(), whose operators are called below autograd. Forward-mode derivatives of `tensors` would be
// lost there without a word. A backward pass calls its operator so as well: autograd has PyTorch's fallback
// for it, which refuses them too, but boxes its arguments, and is slow.
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

// The node of a Function: NAME, backward(), and what torch::autograd::Function tells compiled autograd. Its
// name as PyTorch's node has it is that of a type, spelled out at each pass.
template <typename Function>
struct RecordedCall : torch::autograd::CppNode<Function> {
  std::string name() const override { return Function::NAME; }
};

// Puts a call into the graph, where compute_requires_grad says so; `keep` saves in a context what
// Function::backward needs. That is given a gradient for each output that is there, undefined where none
// comes, and returns one for each input, undefined where none is wanted.
//
// As torch::autograd::Function::apply, which makes ready for inputs and outputs of any kind, and takes the
// host longer. Here outputs are new: none is an input, or a view of one.
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
    // Hooks throw, as checkpoint's do once nothing is left to recompute. An output that the context still has
    // to save would keep its node, the node its context, and the context the output.
    node->ctx_.save_for_backward({});
    node->release_variables();
    throw;
  }
}

}  // namespace kernel_twins
