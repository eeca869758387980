// The activations that kernels can apply on the way, by name.
#pragma once

enum class Activation { none, relu, gelu, gelu_tanh, silu };
