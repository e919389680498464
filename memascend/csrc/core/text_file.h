// Small files of /proc and /sys, read without iostreams: in an extension that a toolchain had linked libstdc++ into,
// beside torch's own copy of it, operator>> ended in a segmentation fault (GCC 13, torch 2.11 for CUDA 13).
#pragma once

#include <string>
#include <vector>

namespace memascend {

// All of it; empty where it cannot be read.
std::string text_of(const std::string& path);

// Numbers with spaces between them, as in 10 21 21; up to what is none.
std::vector<int> numbers_of(const std::string& text);

// The kernel's lists, as in 0-3,8; up to what is none.
std::vector<int> listed(const std::string& text);

}  // namespace memascend
