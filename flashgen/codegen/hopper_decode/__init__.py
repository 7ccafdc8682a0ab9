"""The Hopper decode family: flash-decoding by warps that copy and a warpgroup that multiplies."""
