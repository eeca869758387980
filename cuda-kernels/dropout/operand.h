// Whether a call has an operand that it may leave out.
#pragma once

enum class Operand { MISSING, GIVEN };
