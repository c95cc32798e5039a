"""What a gateway has to survive: malformed requests, spoilt bodies, broken HTTP, and engines that say anything at all.

``python -m tests.rings.fuzz`` starts an installation of its own and goes on for as long as it is told to; the contract tests
run short rounds of the same. Everything is drawn from numbered seeds, so that a finding can be had again.
"""
