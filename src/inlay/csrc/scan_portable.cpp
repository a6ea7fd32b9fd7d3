#define INLAY_SCAN portable
#define INLAY_SUPPORTED true
#include "scan.inl"
