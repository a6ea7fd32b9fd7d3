#define VL 4
#define LINEAR linear_portable
#include "linear.inl"
