"""Huawei Ascend backend of kvport. Importing it imports neither torch nor torch_npu."""
