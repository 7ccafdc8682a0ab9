"""The Hopper forward family: warp-specialised FlashAttention in Gluon, for sm90."""
