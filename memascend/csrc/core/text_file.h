// Reads small files of /proc and /sys without iostreams: in an extension that a toolchain had linked statically with
// libstdc++, in addition to torch's own copy, operator>> caused a segmentation fault (GCC 13, torch 2.11 for CUDA 13).
#pragma once

#include <string>
#include <vector>

namespace memascend {

// Returns the contents of a file, or an empty string if it cannot be read.
std::string text_of(const std::string& path);

// Parses numbers separated by spaces, such as "10 21 21", up to the first text that is not a number.
std::vector<int> numbers_of(const std::string& text);

// Parses a list in the kernel's format, such as "0-3,8", up to the first text that is not a number.
std::vector<int> listed(const std::string& text);

}  // namespace memascend
