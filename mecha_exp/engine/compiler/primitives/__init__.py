"""What methods call and loops do by themselves: sums, ranks and order of rows, arithmetic on runs."""
