"""What a gateway has to survive: malformed requests, spoilt bodies, broken HTTP, and engines that say anything at all."""
