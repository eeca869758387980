// What the host side of a step is made of. No torch and no device code: the bindings, the generated step
// table and the .cu files all include it.
#pragma once

#include <cstddef>
#include <string_view>

// Element types; a step's args say which one its untyped pointers hold.
enum class Dtype { fp32, bf16, fp16 };

// Bytes of zeroed memory that a launcher can ask for.
constexpr size_t ZEROED_BYTES = 8192;

// What a launcher asks its caller for, as it allocates nothing itself.
//
// The workspace is the call's own and holds anything; asked for twice, it is two pieces. The zeroed memory
// may outlive the call: it is zero when a launch begins to run, no launch that may run at the same time has
// the same, and a launcher that uses it must leave it zero when all that it launched is done. Every stream of
// torch's has its own, so has every capture of a stream, where it is zeroed inside the graph, and so has
// every other call on somebody else's stream.
struct Memory {
  void* caller;
  void* (*workspace_of)(void* caller, size_t bytes);
  void* (*zeroed_of)(void* caller);

  void* workspace(size_t bytes) const { return workspace_of(caller, bytes); }  // aligned to 256 bytes
  void* zeroed() const { return zeroed_of(caller); }                           // [ZEROED_BYTES]
};

// One step of an operation's ladder, or a baseline compiled beside the steps.
template <typename Args>
struct Step {
  const char* name;
  void (*launch)(const Args&);  // asynchronous, on args.stream; allocates nothing; throws std::runtime_error
  const char* arch;             // compute capability it needs: ">=8.0", ">=9.0" or "==9.0a"
  bool fp32_out = false;        // also writes an fp32 out where the operation's usual one is narrower
};

// An operation's steps in reading order. setup.py writes the tables from the specs.
template <typename Args>
struct StepTable {
  const Step<Args>* begin;
  const Step<Args>* end;

  // The step of that name, or nullptr.
  const Step<Args>* find(std::string_view name) const {
    for (const Step<Args>* step = begin; step != end; ++step) {
      if (name == step->name) return step;
    }
    return nullptr;
  }
};
