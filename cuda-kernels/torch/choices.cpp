// What backend="auto" chose, kept by the signature of the call; kernel_twins/functional/kept.py says of whom.
//
// A choice depends on the arguments' dtypes, sizes, strides and alignment, and on what PyTorch has switched
// on around the call. These make a key of integers: a call whose key is known takes one lookup instead of the
// rules in Python.
#include "choices.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_map>

namespace {

constexpr size_t MOST = 4096;     // signatures of a function, after which all are forgotten
constexpr int64_t ALIGNMENT = 8;  // elements: an offset that is a multiple is one of 16 bytes, for any dtype

using Key = c10::SmallVector<int64_t, 40>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (const int64_t part : key) {
      hash = (std::rotl(hash, 23) ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15;
    }
    return hash ^ (hash >> 32);
  }
};

struct Choices {
  pybind11::object choose;
  std::unordered_map<Key, pybind11::object, KeyHash> kept;
};

thread_local bool asks_anew = false;

enum Kind : int64_t { NONE, BOOLEAN, INTEGER, REAL, TEXT, DTYPE, SEQUENCE, TENSOR };

const c10::DispatchKeySet SPECIAL({c10::DispatchKey::Python, c10::DispatchKey::Conjugate,
                                   c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                   c10::DispatchKey::Functionalize, c10::DispatchKey::Batched,
                                   c10::DispatchKey::FuncTorchBatched,
                                   c10::DispatchKey::FuncTorchGradWrapper});

bool add(Key& key, const at::Tensor& tensor, bool& on_gpu) {
  const auto* const known = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() ||
      known->has_symbolic_sizes_strides() || known->key_set().has_any(SPECIAL) ||
      known->is_python_dispatch()) {
    return false;
  }
  const auto device = tensor.device();
  on_gpu |= device.is_cuda();
  const std::array<int64_t, 6> small{TENSOR,
                                     static_cast<int64_t>(tensor.scalar_type()),
                                     static_cast<int64_t>(device.type()),
                                     device.index(),
                                     tensor.requires_grad() && c10::GradMode::is_enabled(),
                                     tensor.storage_offset() % ALIGNMENT};
  int64_t packed = tensor.dim();
  for (const int64_t part : small) packed = packed << 8 | (part & 0xFF);
  key.push_back(packed);
  key.append(tensor.sizes().begin(), tensor.sizes().end());
  key.append(tensor.strides().begin(), tensor.strides().end());
  return true;
}

bool add(Key& key, std::string_view text) {
  key.push_back(TEXT);
  key.push_back(static_cast<int64_t>(text.size()));
  for (; !text.empty(); text.remove_prefix(std::min(text.size(), sizeof(int64_t)))) {
    int64_t part = 0;
    std::memcpy(&part, text.data(), std::min(text.size(), sizeof part));
    key.push_back(part);
  }
  return true;
}

// Adds an argument to the key; false if it is of a kind of which a key cannot say all.
bool add(Key& key, PyObject* given, bool& on_gpu, bool inside = false) {
  if (given == Py_None) {
    key.push_back(NONE);
    return true;
  }
  if (THPVariable_CheckExact(given)) return add(key, THPVariable_Unpack(given), on_gpu);
  if (PyBool_Check(given)) {
    key.append({BOOLEAN, given == Py_True});
    return true;
  }
  if (PyLong_CheckExact(given)) {
    int overflow = 0;
    key.append({INTEGER, PyLong_AsLongLongAndOverflow(given, &overflow)});
    return overflow == 0;
  }
  if (PyFloat_CheckExact(given)) {
    key.append({REAL, std::bit_cast<int64_t>(PyFloat_AS_DOUBLE(given))});
    return true;
  }
  if (PyUnicode_CheckExact(given)) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(given, &size);
    if (!text) {  // not all of Python's strings can be encoded
      PyErr_Clear();
      return false;
    }
    return add(key, std::string_view(text, static_cast<size_t>(size)));
  }
  if (THPDtype_Check(given)) {
    key.append({DTYPE, static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type)});
    return true;
  }
  // No right argument is a sequence of sequences, and a list may contain itself.
  if (inside || !(PyTuple_Check(given) || PyList_CheckExact(given))) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(given);
  key.append({SEQUENCE, size});
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!add(key, PySequence_Fast_GET_ITEM(given, i), on_gpu, true)) return false;
  }
  return true;
}

// What is switched on around the call and changes a choice.
void add_settings(Key& key) {
  int64_t packed = static_cast<int64_t>(
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL));
  for (const auto device : {at::kCUDA, at::kCPU}) {
    const bool casts = at::autocast::is_autocast_enabled(device);
    packed = packed << 16 | (casts ? 1 + static_cast<int64_t>(at::autocast::get_autocast_dtype(device)) : 0);
  }
  key.push_back(packed);
}

// Modes, transforms and forward derivatives, around which a call is more than its arguments.
bool is_surrounded() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

bool is_captured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

PyObject* choice(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& [choose, kept] = *static_cast<Choices*>(PyCapsule_GetPointer(self, nullptr));
  Key key;
  bool on_gpu = false;
  bool is_known = !asks_anew && !is_surrounded();
  if (is_known) add_settings(key);
  for (Py_ssize_t i = 0; is_known && i < count; ++i) is_known = add(key, given[i], on_gpu);
  if (is_known) {
    const auto found = kept.find(key);
    if (found != kept.end()) return found->second.inc_ref().ptr();
  }
  auto chosen = pybind11::reinterpret_steal<pybind11::object>(
      PyObject_Vectorcall(choose.ptr(), given, static_cast<size_t>(count), nullptr));
  if (!chosen) throw python_error();
  // During a capture no kernel may be compiled, so that a first call chooses of what is compiled already.
  if (is_known && !(on_gpu && is_captured())) {
    if (kept.size() >= MOST) kept.clear();
    kept.insert_or_assign(std::move(key), chosen);
  }
  return chosen.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef method = {"kept", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(choice)), METH_FASTCALL,
                      "A choice of a backend, kept by the call's signature."};

void forget(PyObject* capsule) { delete static_cast<Choices*>(PyCapsule_GetPointer(capsule, nullptr)); }

}  // namespace

pybind11::object kernel_twins::kept(pybind11::object choose) {
  auto choices = std::make_unique<Choices>(Choices{std::move(choose), {}});
  const pybind11::capsule self(choices.release(), nullptr, forget);
  return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&method, self.ptr()));
}

bool kernel_twins::ask_anew(bool anew) { return std::exchange(asks_anew, anew); }
