"""`megatron-rl-corr accept`: does a model, as trainer and servers have it, sample and train as one policy?"""
