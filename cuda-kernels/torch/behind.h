// Which steps stand behind an operation's public function, as its spec says. No torch: the generated step
// table includes it.
#pragma once

#include <span>
#include <string_view>

namespace kernel_twins {

// Their names, the first that the GPU and the call's sizes allow being taken; none where there is no
// function.
std::span<const char* const> behind(std::string_view op);

}  // namespace kernel_twins
