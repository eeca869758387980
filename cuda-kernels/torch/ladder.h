// How the steps of kernel_twins._ladder come into the tables of kernel_twins._C, which lists the steps of
// both. No torch: the generated step table and the generated ladder include it.
#pragma once

#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "lib/step.h"

namespace kernel_twins {

// The operations and the names of what can be launched: steps, and baselines that are compiled beside them.
extern std::set<std::pair<std::string, std::string>> launchable;

// Imports the ladder where that is needed; throws Python's UnavailableError where it does not have the step.
void require_built(const std::string& op, const std::string& step);

// What a table has as the launcher of a step of the ladder, until that is imported.
template <typename Args>
void launch_from_ladder(const std::string& op, const StepTable<Args>& steps, const std::string& name,
                        const Args& args) {
  require_built(op, name);
  steps.find(name)->launch(args);
}

// Puts a launcher of the ladder into the table.
template <typename Args>
void add(const std::string& op, const StepTable<Args>& steps, const std::string& name,
         void (*launch)(const Args&)) {
  const Step<Args>* step = steps.find(name);
  if (!step) {
    throw std::runtime_error("kernel_twins._C was built before there was " + op + " " + name +
                             " in kernel_twins._ladder: run `python setup.py build_ext`");
  }
  const_cast<Step<Args>*>(step)->launch = launch;  // the rows of the generated tables are no constants
  launchable.emplace(op, name);
}

}  // namespace kernel_twins
