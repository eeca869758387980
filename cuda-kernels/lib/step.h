// The host interface of a step: dtypes, memory, and the step table. Free of torch and of device code, so that
// the bindings, the generated step table and the .cu files can all include it.
#pragma once

#include <cstddef>
#include <string_view>

// Element types. A step's args carry the one of its untyped pointers.
enum class Dtype { fp32, bf16, fp16 };

// Size of the zeroed memory that a launcher can ask for, in bytes.
constexpr size_t ZEROED_BYTES = 8192;

// Scratch memory that a launcher gets from its caller, since launchers allocate nothing.
//
// - workspace: uninitialised, for this call alone; a second request returns a second piece.
// - zeroed: zero when a launch begins to run, and the launcher must leave it zero when its last kernel ends.
//   It may outlive the call. No two launches that may run at the same time share it: each of torch's streams
//   has its own, each capture of a stream has one that is zeroed inside the graph, and on any other stream
//   each call has its own.
struct Memory {
  void* caller;
  void* (*workspace_of)(void* caller, size_t bytes);
  void* (*zeroed_of)(void* caller);

  void* workspace(size_t bytes) const { return workspace_of(caller, bytes); }  // aligned to 256 bytes
  void* zeroed() const { return zeroed_of(caller); }                           // [ZEROED_BYTES]
};

// One step of an operation's ladder, or a baseline that is compiled with the steps.
template <typename Args>
struct Step {
  const char* name;
  void (*launch)(const Args&);  // asynchronous, on args.stream; allocates nothing; throws std::runtime_error
  const char* arch;             // compute capability it needs: ">=8.0", ">=9.0" or "==9.0a"
  bool fp32_out = false;        // can also write an fp32 out for narrower operands
};

// An operation's steps in reading order. The build generates the tables from the specs.
template <typename Args>
struct StepTable {
  const Step<Args>* begin;
  const Step<Args>* end;

  // Returns the step of that name, or nullptr.
  const Step<Args>* find(std::string_view name) const {
    for (const Step<Args>* step = begin; step != end; ++step) {
      if (name == step->name) return step;
    }
    return nullptr;
  }
};
