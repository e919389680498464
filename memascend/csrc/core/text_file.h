// Small files of /proc and /sys, read without iostreams: in an extension that a toolchain had linked libstdc++ into,
// beside torch's own copy of it, operator>> ended in a segmentation fault (GCC 13, torch 2.11 for CUDA 13).
#pragma once

#include <string>

namespace memascend {

// All of it; empty where it cannot be read.
std::string text_of(const std::string& path);

}  // namespace memascend
