// What the host side of a step is made of. No torch and no device code: the bindings, the generated step
// table and the .cu files all include it.
#pragma once

#include <string_view>

// Element types; a step's args say which one its untyped pointers hold.
enum class Dtype { fp32, bf16, fp16 };

// One step of an operation's ladder, or a baseline compiled beside the steps.
template <typename Args>
struct Step {
  const char* name;
  void (*launch)(const Args&);  // asynchronous, on args.stream; allocates nothing; throws std::runtime_error
  const char* arch;             // compute capability it needs: ">=8.0", ">=9.0" or "==9.0a"
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
