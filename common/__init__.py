"""What the recipes share: small modules of plain functions."""
