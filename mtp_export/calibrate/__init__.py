"""Calibration: codes of an MTP layer's weights chosen by what goes through its linears."""
