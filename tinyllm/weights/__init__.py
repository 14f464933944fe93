"""Model files to named parameters: headers read strictly, blocks dequantised, every shape checked."""
