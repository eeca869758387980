// How the steps of kernel_twins._ladder come into the tables of kernel_twins._C, which lists the steps of
// both. No torch: the generated step table and the generated ladder include it.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "lib/step.h"

namespace kernel_twins {

// Whether a step, or a baseline that is compiled beside the steps, can be launched: _C has it, or the ladder
// has added it.
bool has(std::string_view op, std::string_view step);

// What a table has as the launcher of a step that is not loaded.
[[noreturn]] inline void refuse(const std::string& op) {
  throw std::runtime_error(
      "this step of " + op +
      " is not loaded: kernel_twins.load loads it, if `python setup.py build_ext` has built it");
}

// Makes a step known that the table only lists.
template <typename Args>
void add(const StepTable<Args>& steps, const std::string& name, void (*launch)(const Args&)) {
  const Step<Args>* step = steps.find(name);
  if (!step) {
    throw std::runtime_error("kernel_twins._C lists no " + name +
                             ", because it was not built with kernel_twins._ladder: run `python setup.py "
                             "build_ext`");
  }
  const_cast<Step<Args>*>(step)->launch = launch;  // the rows of the generated tables are no constants
}

}  // namespace kernel_twins
