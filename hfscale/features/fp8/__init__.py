"""Matrix products of linear projections in fp8: plan, scales, operators, and all-gathers of weights in fp8."""
