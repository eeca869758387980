// The activations that a kernel's epilogue can apply.
#pragma once

enum class Activation { none, relu, gelu, gelu_tanh, silu };
