"""Multiple choice by log-likelihood; what contexts have in common is computed once, killed runs go on."""
